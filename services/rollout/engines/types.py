"""Requests, outputs and errors that all engines share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["in_place", "retract", "abort", "drain"]
MemoryPart = Literal["weights", "kv_cache"]
"""Memory that an engine frees when it sleeps, and allocates again part by part."""


class EngineError(Exception):
    """The engine's state does not allow the operation."""


class RequestFailed(Exception):
    """A request failed; the engine goes on with others."""


class AnswerTooLarge(RequestFailed):
    """An answer is too large for a message. Retrying does not help."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: the proto SamplingParams with its defaults resolved."""

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
    """A request for n samples of one prompt."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    n: int
    sampling: Sampling
    stream: bool = False
    """Report each token at once instead of each sample when it has ended."""


@dataclass
class Output:
    """New tokens of one sample; the whole sample where the request does not stream."""

    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token at the sampling temperature (1 for greedy), before top-p and top-k."""
    versions: list[int] = field(default_factory=list)
    """Weight version that produced each token."""
    finish_reason: FinishReason | None = None
    """Set with the sample's last output."""
    text: str = ""
    """The whole text; set with the last output."""
    spans_weight_update: bool = False
    """True if the sample continued in place across a weight update; set with the last output."""
    routed_experts: "np.ndarray[Any, Any] | None" = None
    """Experts that each token was routed to, int32 [prompt and answer tokens but the last, layers, top_k]; set with the
    last output if the run returns them."""


@dataclass(frozen=True)
class Version:
    """Identity of weights: after step `version`, under the trainer's `term`."""

    term: int
    version: int


OutputHandler = Callable[[str, list[Output]], None]
"""Called in the engine's thread with a request id and its new outputs."""

FailureHandler = Callable[[str, str], None]
"""Called with the id of a failed request and the reason."""
