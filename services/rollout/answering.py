"""Answers prompts with a model in this process, as a run's engines do at the start, without the service."""

import queue
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relaxd.config import RunConfig
from relaxd.models.folders import resolve_model
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.transformers.engine import TransformersEngine
from services.rollout.engines.types import Output, Request, Version

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
