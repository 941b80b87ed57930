"""Tokens per second of the rollout engine, compared with transformers' generate on the same model, batch and threads.

    python -m benchmarks.rollout --model ~/.cache/relaxd/models/smollm2-135m

Both generate n samples of each prompt at temperature 1, of a forced length. relaxd's engine also reports log-probs;
transformers is measured with and without them. The order of the three changes from round to round. The results are
medians of wall time and of the process's processor time; on a busy machine the latter is more reliable.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.reporting import report
from relaxd.models.folders import resolve_model
from services.rollout.engines.request_types import Output, Request, Sampling, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine

PROMPTS = ["What is 12 + 34?", "What is 71 + 18?", "What is 95 + 5? Answer with the number only.", "What is 40 + 44?"]


def tokens_of(folder: Path) -> list[list[int]]:
    """Return the prompts in ChatML."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROMPTS]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


class Ours:
    """relaxd's engine on a model."""

    def __init__(self, model: PreTrainedModel, threads: int) -> None:
        self._left = 0
        self._done = threading.Event()
        self._engine = TransformersEngine(
            model, str, [], max_running_samples=256, on_output=self._count, on_failure=self._fail, threads=threads
        )
        self._engine.pause("in_place", 60, 60)
        with self._engine.update(Version(1, 0)):
            pass
        self._engine.gate.confirm(Version(1, 0))
        self._engine.gate.resume()

    def generate(self, prompts: list[list[int]], n: int, new: int) -> None:
        """Generate all samples of all prompts."""
        self._left = n * len(prompts)
        self._done.clear()
        for number, prompt in enumerate(prompts):
            sampling = Sampling(new, ignore_eos=True, seed=number)
            self._engine.submit(Request(str(number), tuple(prompt), n, sampling))
        if not self._done.wait(600):
            raise TimeoutError("our engine did not finish within 600 s")

    def _count(self, request_id: str, outputs: list[Output]) -> None:
        self._left -= len(outputs)
        if self._left == 0:
            self._done.set()

    def _fail(self, request_id: str, reason: str) -> None:
        raise RuntimeError(reason)


def theirs(model: PreTrainedModel, prompts: list[list[int]], n: int, new: int, *, logprobs: bool) -> None:
    """Generate with transformers on the same batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": n}
    lengths = {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
    output = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, return_dict_in_generate=True, output_logits=logprobs, **settings, **lengths
    )
    assert output.sequences.shape == (len(prompts) * n, longest + new)
    if logprobs:
        chosen = output.sequences[:, longest:]
        for step, logits in enumerate(output.logits):
            logits.float().log_softmax(-1).gather(-1, chosen[:, step, None])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = tokens_of(folder)
    n, new = arguments.samples, arguments.new_tokens
    ours = Ours(model, arguments.threads)
    contenders: dict[str, Callable[[], None]] = {
        "relaxd (with log-probs)": lambda: ours.generate(prompts, n, new),
        "transformers": lambda: theirs(model, prompts, n, new, logprobs=False),
        "transformers with log-probs": lambda: theirs(model, prompts, n, new, logprobs=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(arguments.rounds + 1):
        names = list(contenders)
        for name in names[number % 3 :] + names[: number % 3]:
            started, used = time.perf_counter(), time.process_time()
            contenders[name]()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - used)
    tokens = len(prompts) * n * new
    wall = {name: statistics.median(times) for name, times in seconds.items()}
    used_up = {name: statistics.median(times) for name, times in processor.items()}
    rows = [
        {
            "engine": name,
            "tokens/s": tokens / wall[name],
            "x transformers": wall["transformers"] / wall[name],
            "tokens per processor second": tokens / used_up[name],
            "x transformers by processor time": used_up["transformers"] / used_up[name],
        }
        for name in contenders
    ]
    report(
        "rollout",
        rows,
        model=folder.name,
        batch=f"{len(prompts)} prompts x {n} samples x {new} new tokens, float32, {arguments.threads} threads",
        rounds=arguments.rounds,
        goal="relaxd >= 1.0 x transformers",
    )


if __name__ == "__main__":
    main()
