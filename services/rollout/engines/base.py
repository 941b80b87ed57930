"""What an engine is asked and what it answers, whichever engine it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["in_place", "retract", "abort", "drain"]
MemoryPart = Literal["weights", "kv_cache"]
"""What an engine gives back when it sleeps, and takes again part by part."""


class EngineError(Exception):
    """The engine cannot do what it was asked in the state in which it is."""


class RequestFailed(Exception):
    """The engine could not work on a request; it goes on with others."""


class AnswerTooLarge(RequestFailed):
    """An answer is too large for a message; another try would be as large."""


@dataclass(frozen=True)
class Sampling:
    """How to sample; the fields of the proto SamplingParams, with nothing left implicit."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """1 means off."""
    top_k: int = 0
    """0 means off."""
    stop_token_ids: tuple[int, ...] = ()
    """Empty means the model's own end tokens."""
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """n answers to one prompt."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    n: int
    sampling: Sampling
    stream: bool = False
    """Report tokens as they come; else each sample once, when it has ended."""


@dataclass
class Output:
    """Some more of one sample (all of it, where the request does not stream)."""

    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token, under the sampling temperature, before top-p and top-k; for greedy under temperature 1."""
    versions: list[int] = field(default_factory=list)
    """Weight version that produced each token."""
    finish_reason: FinishReason | None = None
    """Set with the sample's last output."""
    text: str = ""
    """The whole text, with the last output."""
    spans_weight_update: bool = False
    """With the last output: whether the sample went on in place across a weight update."""
    routed_experts: "np.ndarray[Any, Any] | None" = None
    """With the last output, where the run asks for it: the experts that each token was sent to, int32
    [prompt and answer tokens but the last, layers, top_k]."""


@dataclass(frozen=True)
class Version:
    """Weights: those after step `version`, as trained under the trainer's `term`."""

    term: int
    version: int


OutputHandler = Callable[[str, list[Output]], None]
"""Called with a request id and its new outputs, in the engine's thread."""

FailureHandler = Callable[[str, str], None]
"""Called with a request id and the reason for which the request failed as a whole."""
