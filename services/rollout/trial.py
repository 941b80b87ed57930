"""Answers prompts with a run's model, as its engines do at the start, on the CPU: `python -m services.rollout.trial`.

Reads one JSON object: config (a RunConfig), samples (answers to each prompt) and prompts (lists of token ids).
Prints one: {"answers": [[text, ...], ...]}, in the prompts' order, or {"error": reason}.
"""

import json
import sys
from collections.abc import Sequence

from relaxd.config import RunConfig
from relaxd.models import DataError
from services.rollout.answering import answer_requests
from services.rollout.engines.types import Request
from services.rollout.service.group_generator import group_seed
from services.rollout.service.requests import run_sampling


def generate(config: RunConfig, prompts: Sequence[Sequence[int]], samples: int) -> list[list[str]]:
    """Return `samples` answers to each prompt. Raises DataError: the model can't be found; RuntimeError: it fails."""
    requests = []
    for number, tokens in enumerate(prompts):
        sampling = run_sampling(config.rollout, group_seed(config.run.seed, str(number)))
        requests.append(Request(str(number), tuple(tokens), samples, sampling))
    answers: list[list[str]] = [[] for _ in prompts]
    for name, output in answer_requests(config, requests):
        answers[int(name)].append(output.text)
    return answers


def answer_prompts() -> None:
    """Run the program."""
    asked = json.load(sys.stdin)
    try:
        answers = generate(RunConfig.model_validate(asked["config"]), asked["prompts"], asked["samples"])
    except (DataError, RuntimeError) as error:
        print(json.dumps({"error": f"the model can't answer: {error}"}))
        sys.exit(1)
    print(json.dumps({"answers": answers}))


if __name__ == "__main__":
    answer_prompts()
