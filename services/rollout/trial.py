"""Answers prompts with a run's model, as its engines do at the start, on the CPU: `python -m services.rollout.trial`.

Reads one JSON object: config (a RunConfig), samples (answers to each prompt) and prompts (lists of token ids).
Prints one: {"answers": [[text, ...], ...]}, in the prompts' order, or {"error": reason}.
"""

import json
import queue
import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relaxd.config import RunConfig
from relaxd.data.errors import DataError
from relaxd.data.models import resolve_model
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.transformers.engine import TransformersEngine
from services.rollout.engines.types import Output, Request, Version
from services.rollout.service.group_generator import group_seed
from services.rollout.service.requests import run_sampling

SAMPLE_SECONDS = 600.0
"""Limit of the time between two answers."""


def generate(config: RunConfig, prompts: Sequence[Sequence[int]], samples: int) -> list[list[str]]:
    """Return `samples` answers to each prompt. Raises DataError: the model can't be found; RuntimeError: it fails."""
    folder = resolve_model(config.model.path)
    reported: queue.Queue[tuple[str, Output | str]] = queue.Queue()

    def on_output(name: str, outputs: Sequence[Output]) -> None:
        for output in outputs:
            reported.put((name, output))

    engine = TransformersEngine(
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.rollout.dtype)).eval(),
        AutoTokenizer.from_pretrained(folder).decode,
        read_model_folder(folder).end_ids,
        max_running_samples=config.rollout.max_running_samples,
        on_output=on_output,
        on_failure=lambda name, reason: reported.put((name, str(reason))),
    )
    engine.pause("in_place", lease_seconds=60, timeout=60)
    with engine.update(Version(1, 0)):
        engine.touch()
    engine.resume()
    for number, tokens in enumerate(prompts):
        sampling = run_sampling(config.rollout, group_seed(config.run.seed, str(number)))
        engine.submit(Request(str(number), tuple(tokens), samples, sampling))
    answers: list[list[str]] = [[] for _ in prompts]
    for _ in range(samples * len(prompts)):
        name, output = reported.get(timeout=SAMPLE_SECONDS)
        if isinstance(output, str):
            raise RuntimeError(output)
        answers[int(name)].append(output.text)
    engine.stop()
    return answers


def main() -> None:
    """Run the program."""
    asked = json.load(sys.stdin)
    try:
        answers = generate(RunConfig.model_validate(asked["config"]), asked["prompts"], asked["samples"])
    except (DataError, RuntimeError) as error:
        print(json.dumps({"error": f"the model can't answer: {error}"}))
        sys.exit(1)
    print(json.dumps({"answers": answers}))


if __name__ == "__main__":
    main()
