"""Time of the demo's training step, compared with plain transformers and torch AdamW on the same batch.

    python -m benchmarks.training_step ~/.cache/relaxd/models/smollm2-135m

Both sides get the same samples (4 groups of 8, about 30 prompt and 8 response tokens), the same GRPO loss, float32 and
the same threads, and alternate in one process: forward, backward, clipping, AdamW. The plain side is a direct
implementation: a right-padded batch, the model's logits (all of them, or with --response-logits only where a response
token is predicted), log_softmax, the loss, clip_grad_norm_, default AdamW. Ours computes each group's prompt once,
unless --no-shared-prompts. The results are medians of wall time and of processor time; on a busy machine the latter is
more reliable.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.reporting import report
from relaxd.algorithms import LossInputs, create
from relaxd.config import AlgorithmConfig, GRPOConfig, TrainerConfig
from services.trainer.batch.micro_batch import TrainSequence, pack
from services.trainer.batch.micro_batch_division import SequenceSize, pack_bins
from services.trainer.learner.learner import Learner

LR = 1e-5


def make_samples(vocab: int, groups: int, samples: int, seed: int) -> list[TrainSequence]:
    """Make random samples of the demo's lengths; a group's samples share a prompt and differ in length."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        prompt = rng.integers(0, vocab, int(rng.integers(29, 32)))
        for _ in range(samples):
            length = int(rng.integers(5, 12))
            made.append(
                TrainSequence.from_response(
                    prompt,
                    rng.integers(0, vocab, length),
                    loss_mask=np.ones(length, np.uint8),
                    columns={
                        "rollout_logprobs": np.full(length, -10.0, np.float32),
                        "advantages": np.full(length, rng.normal(), np.float32),
                    },
                    weight=np.ones(length, np.float32),
                )
            )
    return made


def divide(samples: Sequence[TrainSequence], budget: int) -> list[list[TrainSequence]]:
    """Divide samples among micro-batches of at most `budget` tokens, as the trainer does, each in the given order."""
    sizes = [
        SequenceSize(f"{index:06}", index, sample.prompt_length, len(sample.tokens) - sample.prompt_length)
        for index, sample in enumerate(samples)
    ]
    bins = pack_bins(sizes, budget)
    return [[samples[index] for index in sorted(one.index for one in each.sequences)] for each in bins]


def plain_step(
    folder: Path, algorithm: AlgorithmConfig, *, response_logits: bool
) -> Callable[[list[TrainSequence]], float]:
    """Return the step with transformers and torch alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    loss_of = create(algorithm).loss

    def step(samples: list[TrainSequence]) -> float:
        width = max(len(sample.tokens) for sample in samples)

        def padded(name: str) -> torch.Tensor:
            rows = [
                np.pad(
                    sample.columns[name] if name in sample.columns else getattr(sample, name),
                    (0, width - len(sample.tokens)),
                )
                for sample in samples
            ]
            return torch.from_numpy(np.stack(rows))

        tokens = padded("tokens")
        attention = torch.tensor([[i < len(sample.tokens) for i in range(width)] for sample in samples]).long()
        mask = padded("loss_mask")[:, 1:].bool()
        if response_logits:
            hidden = model.model(input_ids=tokens, attention_mask=attention).last_hidden_state[:, :-1][mask]
            logits = model.lm_head(hidden)
        else:
            logits = model(input_ids=tokens, attention_mask=attention).logits[:, :-1][mask]
        logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:][mask][:, None])[:, 0]
        inputs = LossInputs(
            logprobs=logprobs,
            columns={name: padded(name)[:, 1:][mask] for name in samples[0].columns},
            mask=torch.ones_like(logprobs),
            weight=padded("weight")[:, 1:][mask],
            sequence=mask.nonzero()[:, 0],
            sequences=len(samples),
        )
        loss = loss_of(inputs).loss / int(mask.sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def our_step(
    folder: Path, algorithm: AlgorithmConfig, threads: int, budget: int, *, share_prompts: bool
) -> Callable[[list[TrainSequence]], float]:
    """Return the trainer's step, including packing."""
    config = TrainerConfig.model_validate({"threads": threads, "micro_batch_tokens": budget, "optimizer": {"lr": LR}})
    learner = Learner(folder, config, algorithm, steps=1000)

    def step(samples: list[TrainSequence]) -> float:
        for batch in divide(samples, budget):
            learner.accumulate([pack(batch, share_prompts=share_prompts)])
        return learner.finish(float(sum(int(sample.loss_mask.sum()) for sample in samples))).loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side (one more is for warming up)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--budget", type=int, default=4096, help="trainer.micro_batch_tokens")
    parser.add_argument("--no-shared-prompts", dest="shared_prompts", action="store_false")
    parser.add_argument("--response-logits", action="store_true", help="the plain side too computes only these logits")
    options = parser.parse_args()

    algorithm = GRPOConfig()
    sides = {
        "relaxd": our_step(
            options.model, algorithm, options.threads, options.budget, share_prompts=options.shared_prompts
        ),
        "plain": plain_step(options.model, algorithm, response_logits=options.response_logits),
    }
    torch.set_num_threads(options.threads)
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    wall: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    for round_number in range(options.rounds + 1):
        samples = make_samples(vocab, options.groups, options.samples, seed=round_number)
        losses = {}
        for side, step in sides.items():
            wall_start, processor_start = time.perf_counter(), time.process_time()
            losses[side] = step(samples)
            if round_number:
                wall[side].append(time.perf_counter() - wall_start)
                processor[side].append(time.process_time() - processor_start)
        print(f"round {round_number}: loss " + ", ".join(f"{side} {loss:.6f}" for side, loss in losses.items()))
    rows = []
    for name, times in (("wall", wall), ("processor", processor)):
        ours, plain = statistics.median(times["relaxd"]), statistics.median(times["plain"])
        rows.append({"time": name, "relaxd_seconds": ours, "plain_seconds": plain, "ratio": ours / plain})
    variant = "" if options.shared_prompts else "-unshared"
    variant += "-response-logits" if options.response_logits else ""
    peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    facts = {"goal": "ratio at most 1.15", "threads": options.threads, "peak_rss_mb_of_both": peak}
    report(f"training-step{variant}", rows, **facts)


if __name__ == "__main__":
    main()
