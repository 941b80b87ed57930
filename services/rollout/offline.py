"""Generates answers with a run's initial model in this process, without the rollout service.

`python -m services.rollout.offline` reads one JSON object: config (a RunConfig), device (see `answer_requests`), and
questions, each with prompt (token ids), media (PromptMedia.to_json, or null), n and sampling (fields of Sampling; by
default the run's). It prints a line of JSON for each ended answer: question and sample (their numbers), text, length
(tokens) and finish_reason. After an error the last line is {"error": reason}.
"""

import json
import queue
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from transformers import AutoTokenizer, PreTrainedModel

from relaxd.board import STAGES, Column
from relaxd.config import RunConfig
from relaxd.data.vision import VisionModel
from relaxd.media.prompt_media import PromptMedia
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from relaxd.seeds import seed_of
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.request_types import Output, Request, Sampling, Version, run_sampling
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from services.rollout.engines.transformers.vision import load_model
from services.rollout.service.answers import Answers

SAMPLE_SECONDS = 600.0
"""Maximum time until the next answer ends, in seconds."""


class OfflineEngine:
    """The transformers engine in this process. As a context manager it stops at the end of the block."""

    def __init__(
        self,
        model: PreTrainedModel,
        decode: Callable[[list[int]], str],
        end_ids: Sequence[int],
        *,
        max_running_samples: int = 64,
        threads: int = 0,
        vision: VisionModel | None = None,
    ) -> None:
        """Start the engine. TransformersEngine explains the parameters."""
        self._reported: queue.Queue[tuple[str, Output | str]] = queue.Queue()
        self._engine = TransformersEngine(
            model,
            decode,
            end_ids,
            max_running_samples=max_running_samples,
            on_output=self._report,
            on_failure=self._fail,
            threads=threads,
            vision=vision,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.stop()

    def _report(self, name: str, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._reported.put((name, output))

    def _fail(self, request_id: str, reason: str, *, wrong_media: bool = False) -> None:
        self._reported.put((request_id, reason))

    def load(self, term: int, version: int, tensors: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """Pause between two tokens, copy `tensors` into the model, set the version of its weights, and continue.

        Without tensors the model keeps its weights.
        """
        self._engine.pause("in_place", lease_seconds=60, timeout=60)
        weights = Version(term, version)
        with self._engine.update(weights):
            self._engine.gate.touch()
            self._engine.model.load_state_dict(dict(tensors), strict=False)
        self._engine.gate.confirm(weights)
        self._engine.gate.resume()

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[str, Output]]:
        """Yield (request id, answer) for each answer when it has ended.

        Raises RuntimeError if the model fails, or if no answer ends for SAMPLE_SECONDS.
        """
        for request in requests:
            self._engine.submit(request)
        for _ in range(sum(request.n for request in requests)):
            try:
                name, output = self._reported.get(timeout=SAMPLE_SECONDS)
            except queue.Empty:
                raise RuntimeError(f"there was no answer for {SAMPLE_SECONDS:g} s") from None
            if isinstance(output, str):
                raise RuntimeError(output)
            yield name, output

    def answer_group(
        self, group_id: str, prompt: Sequence[int], samples: int, max_new_tokens: int
    ) -> dict[str, Column]:
        """Generate a group's samples. Returns the columns that the stage "rollout" writes for the group."""
        answers = Answers(samples)
        sampling = Sampling(max_new_tokens, seed=seed_of(0, group_id))
        for _, output in self.answers([Request(group_id, tuple(prompt), samples, sampling)]):
            answers.take(output)
        return answers.columns(STAGES["rollout"].writes)


def answer_requests(config: RunConfig, requests: Sequence[Request], device: str) -> Iterator[tuple[str, Output]]:
    """Yield (request id, answer) for each answer of a run's model when it has ended.

    `device`: "cpu", "cuda", or "auto" for "cuda" if a GPU exists, else "cpu".

    Raises DataError if the model can't be found; RuntimeError as `OfflineEngine.answers`, and without the GPU.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise RuntimeError("torch finds no GPU here (CUDA_VISIBLE_DEVICES, or a build of torch for CPUs)")
    place = ("cuda" if has_gpu else "cpu") if device == "auto" else device
    folder = resolve_model(config.model.path)
    model, vision = load_model(folder, getattr(torch, config.rollout.dtype))
    with OfflineEngine(
        model.to(place),
        AutoTokenizer.from_pretrained(folder).decode,
        read_model_folder(folder).end_ids,
        max_running_samples=config.rollout.max_running_samples,
        threads=config.rollout.threads,
        vision=vision,
    ) as engine:
        engine.load(term=1, version=0)
        yield from engine.answers(requests)


def _request(config: RunConfig, number: int, question: Mapping[str, Any]) -> Request:
    if (given := question.get("sampling")) is None:
        sampling = run_sampling(config.rollout, seed_of(config.run.seed, str(number)))
    else:
        fields: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
        sampling = Sampling(**fields)
    media = PromptMedia.from_json(question["media"])
    return Request(str(number), tuple(question["prompt"]), question["n"], sampling, media=media)


def main() -> None:
    """Answer the questions on standard input, as the module describes. Print each answer when it has ended."""
    asked = json.load(sys.stdin)
    config = RunConfig.model_validate(asked["config"])
    try:
        requests = [_request(config, number, question) for number, question in enumerate(asked["questions"])]
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
    main()
