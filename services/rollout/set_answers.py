"""Answers the prompts of an evaluation set with a model: `python -m services.rollout.set_answers`.

Reads one JSON object: config (a RunConfig), device (see `answer_requests`), and questions, each with prompt (token
ids), n and sampling (fields of Sampling). Prints a JSON object in a line for each answer when it has ended: question
and sample (their numbers), text, length (tokens) and finish_reason; or {"error": reason}, which is the last.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from relaxd.config import RunConfig
from relaxd.models import DataError
from services.rollout.answering import answer_requests
from services.rollout.engines.types import Request, Sampling


def _request(number: int, question: Mapping[str, Any]) -> Request:
    lists = {name: tuple(value) for name, value in question["sampling"].items() if isinstance(value, list)}
    sampling = Sampling(**{**question["sampling"], **lists})
    return Request(str(number), tuple(question["prompt"]), question["n"], sampling)


def answer_set() -> None:
    """Run the program."""
    asked = json.load(sys.stdin)
    requests = [_request(number, question) for number, question in enumerate(asked["questions"])]
    config = RunConfig.model_validate(asked["config"])
    try:
        for name, output in answer_requests(config, requests, asked["device"]):
            answer = {
                "question": int(name),
                "sample": output.sample,
                "text": output.text,
                "length": len(output.tokens),
                "finish_reason": output.finish_reason,
            }
            print(json.dumps(answer), flush=True)
    except (DataError, RuntimeError) as error:
        print(json.dumps({"error": f"the model can't answer: {error}"}), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    answer_set()
