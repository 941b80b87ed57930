"""An engine in this process, and what it said."""

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from relaxd.media.prompt_media import NO_MEDIA, PromptMedia
from services.rollout.engines.request_types import Output, Request, Sampling, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from services.rollout.engines.transformers.vision import load_model


class Answer:
    """Everything that was reported of one sample."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.likeliest: list[list[int]] = []
        self.spans_weight_update: list[bool] = []
        """For each token, whether it was reported as of a sample that had continued in place across an update."""
        self.last: Output | None = None
        self.outputs = 0

    def add(self, output: Output) -> None:
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.versions += output.versions
        self.likeliest += map(list, output.likeliest)
        self.spans_weight_update += [output.spans_weight_update] * len(output.tokens)
        self.outputs += 1
        if output.finish_reason is not None:
            assert self.last is None, "reported as finished twice"
            self.last = output


class Harness:
    """Runs an engine; `tick` is a hook called with every report, in the engine's thread."""

    def __init__(self, folder: Path, *, max_running_samples: int = 64, serve: bool = True) -> None:
        self.model, vision = load_model(folder, torch.float32)
        self.answers: dict[str, dict[int, Answer]] = defaultdict(lambda: defaultdict(Answer))
        self.failures: dict[str, str] = {}
        self.wrong_media: set[str] = set()
        """Requests that failed because of their media."""
        self.finish_order: list[str] = []
        self._heard = threading.Condition()
        self.tick: Any = lambda request_id: None
        self.engine = TransformersEngine(
            self.model,
            lambda tokens: " ".join(map(str, tokens)),
            [2],
            max_running_samples=max_running_samples,
            on_output=self._on_output,
            on_failure=self._on_failure,
            vision=vision,
        )
        if serve:
            self.set_weights(Version(1, 0))

    def set_weights(self, version: Version, state: dict[str, torch.Tensor] | None = None) -> None:
        self.engine.pause("in_place", 60, 20)
        self.update(version, state)
        self.engine.gate.confirm(version)
        self.engine.gate.resume()

    def update(self, version: Version, state: dict[str, torch.Tensor] | None = None) -> None:
        with self.engine.update(version):
            if state is not None:
                self.engine.gate.touch()
                self.model.load_state_dict(state)

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        n: int = 1,
        *,
        stream: bool = True,
        report_every: int = 1,
        begun: dict[int, tuple[int, ...]] | None = None,
        likeliest: int = 0,
        media: PromptMedia = NO_MEDIA,
        **sampling: Any,
    ) -> None:
        own = Sampling(**sampling)
        self.engine.submit(
            Request(request_id, tuple(prompt), n, own, stream, report_every, begun or {}, likeliest, media)
        )

    def wait(self, request_id: str, n: int = 1) -> list[Answer]:
        with self._heard:
            done = self._heard.wait_for(
                lambda: (
                    request_id in self.failures
                    or sum(a.last is not None for a in self.answers[request_id].values()) == n
                ),
                30,
            )
        assert done, f"{request_id} did not end within 30 s"
        assert request_id not in self.failures, self.failures[request_id]
        return [self.answers[request_id][sample] for sample in range(n)]

    def wait_for_tokens(self, request_id: str, count: int) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.answers[request_id][0].tokens) >= count, 30)

    def generate(self, prompt: list[int], n: int = 1, **sampling: Any) -> list[Answer]:
        request_id = f"request-{len(self.answers)}"
        self.submit(request_id, prompt, n, **sampling)
        return self.wait(request_id, n)

    def _on_output(self, request_id: str, outputs: list[Output]) -> None:
        with self._heard:
            for output in outputs:
                self.answers[request_id][output.sample].add(output)
                if output.finish_reason is not None:
                    self.finish_order.append(request_id)
            self._heard.notify_all()
        self.tick(request_id)

    def _on_failure(self, request_id: str, reason: str, *, wrong_media: bool = False) -> None:
        with self._heard:
            self.failures[request_id] = reason
            if wrong_media:
                self.wrong_media.add(request_id)
            self._heard.notify_all()


def load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def full_logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-prob of each answer token from one forward pass over everything, without cache or padding."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
