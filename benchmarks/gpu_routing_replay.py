"""Cost and effect of routing replay: the trainer's learner on a mixture of experts, on one GPU.

    python -m benchmarks.gpu_routing_replay
    python -m benchmarks.gpu_routing_replay --engine sglang --memory-fraction 0.3
    python -m benchmarks.gpu_routing_replay --engine none --rounds 40

**Cost**: seconds of packing, forward and backward of a step's micro-batches, without and with replay of the experts
that the routers choose anyway, so that both compute the same. They alternate; medians. Also of the pass that records
experts, against one that doesn't.

**Effect**: an engine with the same weights in bf16 says which experts each token went to, and the log-prob of each
token. The gap is the trainer's log-prob minus that, without and with replay of these experts. transformers plays the
engine, and reads the random tokens of the first part; or SGLang does, and answers random prompts, which are a quarter
of the tokens. Then, and without an engine, the optimizer is in the host's memory, so that it fits a GPU of 80 GB.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.gpu_models import make_config, make_learner, make_sequences
from benchmarks.reporting import report
from relaxd.config import RolloutConfig
from relaxd.engines import ENGINES
from relaxd.v1 import rollout_pb2
from services.rollout.engines.request_types import Version
from services.trainer.batch.micro_batch import TrainSequence, pack
from services.trainer.learner.learner import Learner
from tests.kit.engines import EngineRunner, receive_request
from tests.kit.megatron_world import shut_down
from tests.kit.models import byte_tokenizer


def with_experts(sequences: Sequence[TrainSequence], experts: NDArray[Any]) -> list[TrainSequence]:
    """Return sequences of equal length with their experts, [tokens of all, layers, top_k]."""
    parts = np.split(experts.astype(np.int16), len(sequences))
    return [replace(one, experts=part) for one, part in zip(sequences, parts, strict=True)]


def seconds_of(calls: Sequence[Callable[[], object]], after: Callable[[], object], rounds: int) -> list[float]:
    """Return the median seconds of each call. They alternate, and `after` follows each; the first round warms up."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, times in zip(calls, taken, strict=True):
            synchronize()
            began = time.perf_counter()
            call()
            synchronize()
            times.append(time.perf_counter() - began)
            after()
    return [statistics.median(times[1:]) for times in taken]


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def ask_engine(
    learner: Learner, sequences: Sequence[TrainSequence], folder: Path
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return transformers' experts [tokens of all, layers, top_k] and log-probs [tokens of all], 0 for first tokens.

    The weights go through `folder`.
    """
    learner.save_hf(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    device = learner.world.device
    model.to(device)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, inputs, output: chosen.append(output[-1]))
    experts, logprobs = [], []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.tokens).to(device)
        chosen.clear()
        logits = model(tokens[None]).logits[0].float()
        found = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        experts.append(torch.stack(chosen, 1).cpu().numpy())
        logprobs.append(np.concatenate([np.zeros(1, np.float32), found.cpu().numpy()]))
    return np.concatenate(experts), np.concatenate(logprobs)


def ask_sglang(
    learner: Learner, prompts: NDArray[np.integer], new: int, folder: Path, memory_fraction: float
) -> tuple[list[TrainSequence], NDArray[Any], NDArray[np.float32]]:
    """Let SGLang answer prompts [N, P] with `new` tokens each.

    Returns:
        The sequences, and what `ask_engine` returns of them, but 0 for the log-probs of prompts.
    """
    learner.save_hf(folder)
    byte_tokenizer().save_pretrained(folder)
    config = RolloutConfig(
        engine="sglang",
        dtype="bfloat16",
        return_routed_experts=True,
        memory_fraction=memory_fraction,
        max_running_samples=len(prompts),
        sglang={"attention_backend": "triton", "sampling_backend": "pytorch", "disable_cuda_graph": True},
    )
    runner = EngineRunner()
    serving = replace(ENGINES["sglang"], process="benchmarks.engine_process")  # the weights that it loads
    with mock.patch.dict(ENGINES, sglang=serving):
        runner.start(folder, config, timeout=300)
    try:
        group = {"name": "none", "timeout_seconds": 10}
        runner.pause()
        runner.run(runner.engine.join(rollout_pb2.JoinWeightGroupRequest(group=group)))
        runner.run(runner.engine.receive(receive_request("none", Version(1, 0), 10)))
        runner.resume()
        asked = [runner.ask(one, max_new_tokens=new, temperature=1.0, ignore_eos=True) for one in prompts.tolist()]
        answers = [runner.wait(each)[0] for each in asked]
    finally:
        runner.close()
    sequences, experts, logprobs = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        chosen = None if answer.last is None else answer.last.routed_experts
        assert chosen is not None, "SGLang told no experts"
        experts.append(np.concatenate([chosen, chosen[-1:]]))
        ones = np.ones(new, np.float32)
        columns = {"rollout_logprobs": np.array(answer.logprobs, np.float32), "advantages": ones}
        mask = np.ones(new, np.uint8)
        made = TrainSequence.from_response(
            prompt, np.array(answer.tokens), loss_mask=mask, columns=columns, weight=ones
        )
        sequences.append(made)
        logprobs.append(made.columns["rollout_logprobs"])
    return sequences, np.concatenate(experts), np.concatenate(logprobs)


def gap(learner: Learner, sequences: Sequence[TrainSequence], engine: NDArray[np.float32]) -> dict[str, float]:
    """Return statistics of the size of the gap over the trained tokens."""
    batch = pack(sequences)
    trained = batch.loss_mask != 0
    difference = np.abs(learner.log_probs([batch])[0] - engine)[trained]
    return {
        "gap_mean": float(difference.mean()),
        "gap_p99": float(np.quantile(difference, 0.99)),
        "gap_max": float(difference.max()),
    }


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the micro-batch; an H200 takes 16384")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, in the first part")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds; one more is for warming up")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--engine", choices=("transformers", "sglang", "none"), default="transformers")
    parser.add_argument("--memory-fraction", type=float, default=0.3, help="of the GPU, for SGLang")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))
    shut_down()


def facts_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured, and on what."""
    return {
        "tokens": options.tokens,
        "micro_batches": options.micro_batches,
        "engine": options.engine,
        "recompute": options.recompute,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
    }


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure and report."""
    shape = "moe-untied" if options.engine == "sglang" else "moe"
    config = make_config(shape)
    settings = {
        "micro_batch_tokens": options.tokens,
        "recompute": options.recompute,
        "routing_replay": "rollout",  # replays where a micro-batch brings experts
        "optimizer": {"cpu_offload": options.engine != "transformers"},
    }
    (folder / "config").mkdir()
    learner = make_learner(shape, 1, settings, folder / "config")
    plain = make_sequences(config.vocab_size, options.tokens, options.sequences)
    _, (recorded,) = learner.log_probs_and_experts([pack(plain)])
    replayed = with_experts(plain, recorded)

    def train(sequences: Sequence[TrainSequence]) -> None:
        learner.accumulate([pack(sequences) for _ in range(options.micro_batches)])

    free, replay = seconds_of([partial(train, plain), partial(train, replayed)], learner.discard, options.rounds)
    batches = [pack(plain)]
    passes = [partial(learner.log_probs, batches), partial(learner.log_probs_and_experts, batches)]
    forward, recording = seconds_of(passes, synchronize, options.rounds)
    learner.discard()
    peak = torch.cuda.max_memory_allocated() / 1e9
    if options.engine == "none":
        rows = [
            {"replay": name, "forward_backward_seconds": each} for name, each in (("none", free), ("rollout", replay))
        ]
        report("gpu-routing-replay-cost", rows, **facts_of(options), rounds=options.rounds, cost=replay / free - 1)
        return
    if options.engine == "sglang":
        del replayed, train
        torch.cuda.empty_cache()
        length = options.tokens // options.sequences
        prompts = np.random.default_rng(1).integers(3, config.vocab_size, (options.sequences, length // 4))
        plain, experts, engine = ask_sglang(
            learner, prompts, length - length // 4, folder / "weights", options.memory_fraction
        )
        _, (recorded,) = learner.log_probs_and_experts([pack(plain)])
    else:
        experts, engine = ask_engine(learner, plain, folder / "weights")
    # The experts of a sequence's last token don't matter, and SGLang doesn't tell them.
    told = np.arange(len(recorded)) % (options.tokens // options.sequences) != options.tokens // options.sequences - 1
    own, chosen = np.sort(recorded[told], -1), experts[told]
    facts = facts_of(options) | {
        "replay_cost": replay / free - 1,
        "recording_cost_of_a_forward_pass": recording / forward - 1,
        "engines_choices_that_differ": float(1 - (own[..., None] == chosen[..., None, :]).any(-1).mean()),
        "peak_memory_gb": peak,
    }
    rows = [
        {"replay": "none", "forward_backward_seconds": free, **gap(learner, plain, engine)},
        {"replay": "rollout", "forward_backward_seconds": replay, **gap(learner, with_experts(plain, experts), engine)},
    ]
    report("gpu-routing-replay" + ("-sglang" if options.engine == "sglang" else ""), rows, **facts)


if __name__ == "__main__":
    main()
