"""Answers of a model in this process, as a run's engines give them at the start, without the rollout service.

`python -m services.rollout.offline set` answers an evaluation set. It reads one JSON object: config (a RunConfig),
device (see `answer_requests`), and questions, each with prompt (token ids), n and sampling (fields of Sampling). It
prints a JSON object in a line for each answer when it has ended: question and sample (their numbers), text, length
(tokens) and finish_reason; or {"error": reason}, which is the last.

`python -m services.rollout.offline prompts` answers prompts of a run on the CPU. It reads one JSON object: config,
samples (answers to each prompt) and prompts (lists of token ids), and prints one: {"answers": [[text, ...], ...]}, in
the prompts' order, or {"error": reason}.
"""

import json
import queue
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relaxd.config import RunConfig
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.request_types import Output, Request, Sampling, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from services.rollout.service.group_generator import group_seed
from services.rollout.service.request_checks import run_sampling

SAMPLE_SECONDS = 600.0
"""Limit of the time between two answers."""


def answer_requests(
    config: RunConfig, requests: Sequence[Request], device: str = "cpu"
) -> Iterator[tuple[str, Output]]:
    """Yield (request id, answer) for each answer when it has ended, with its tokens and its text.

    The model is on `device`: "cpu", "cuda", or "auto": "cuda" if there is a GPU.

    Raises DataError: the model can't be found; RuntimeError: there is no GPU, the model fails, or it gives no answer
    for SAMPLE_SECONDS.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise RuntimeError("torch finds no GPU here (CUDA_VISIBLE_DEVICES, or a build of torch for CPUs)")
    place = ("cuda" if has_gpu else "cpu") if device == "auto" else device
    folder = resolve_model(config.model.path)
    reported: queue.Queue[tuple[str, Output | str]] = queue.Queue()

    def on_output(name: str, outputs: Sequence[Output]) -> None:
        for output in outputs:
            reported.put((name, output))

    engine = TransformersEngine(
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.rollout.dtype)).to(place).eval(),
        AutoTokenizer.from_pretrained(folder).decode,
        read_model_folder(folder).end_ids,
        max_running_samples=config.rollout.max_running_samples,
        on_output=on_output,
        on_failure=lambda name, reason: reported.put((name, str(reason))),
        threads=config.rollout.threads,
    )
    engine.pause("in_place", lease_seconds=60, timeout=60)
    with engine.update(Version(1, 0)):
        engine.touch()
    engine.resume()
    try:
        for request in requests:
            engine.submit(request)
        for _ in range(sum(request.n for request in requests)):
            try:
                name, output = reported.get(timeout=SAMPLE_SECONDS)
            except queue.Empty:
                raise RuntimeError(f"there was no answer for {SAMPLE_SECONDS:g} s") from None
            if isinstance(output, str):
                raise RuntimeError(output)
            yield name, output
    finally:
        engine.stop()


def _request(number: int, question: Mapping[str, Any]) -> Request:
    lists = {name: tuple(value) for name, value in question["sampling"].items() if isinstance(value, list)}
    sampling = Sampling(**{**question["sampling"], **lists})
    return Request(str(number), tuple(question["prompt"]), question["n"], sampling)


def answer_set() -> None:
    """Answer the questions on standard input, each as soon as it can."""
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
    """Answer the prompts on standard input, all at once."""
    asked = json.load(sys.stdin)
    try:
        answers = generate(RunConfig.model_validate(asked["config"]), asked["prompts"], asked["samples"])
    except (DataError, RuntimeError) as error:
        print(json.dumps({"error": f"the model can't answer: {error}"}))
        sys.exit(1)
    print(json.dumps({"answers": answers}))


if __name__ == "__main__":
    {"set": answer_set, "prompts": answer_prompts}[sys.argv[1]]()
