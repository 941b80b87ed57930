"""Samples of an external server: its stream events as Outputs, with the weight version of every token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from relaxd.process.json_child import ChildRequestError
from services.rollout.engines.sglang_external.client import ServerGone
from services.rollout.engines.types import FinishReason, Output, Version

EVENT_TOKENS = 32
"""Tokens per event of a request that does not stream. Fewer would slow the server down; more would leave the version of
more tokens uncertain at an update (see ExternalSample)."""
ONLY_AT_END = 1 << 30
"""Tokens per event that give a sample a single event."""


@dataclass(frozen=True)
class EventStyle:
    """The form of a server's events."""

    incremental: bool
    """True if an event has only the new tokens instead of all tokens of the sample so far."""
    interval: int
    """Tokens per event. The first token always has its own event."""
    late: int
    """Tokens of older weights that are reported after an update: 1 where the server's scheduler overlaps a batch with
    reporting the one before."""


def label(weights: Version) -> str:
    """Return the server's name of a version."""
    return f"{weights.term}:{weights.version}"


def parse_label(text: object) -> Version | None:
    """Return the version of a label; None if relaxd did not set it."""
    term, colon, version = str(text).partition(":")
    return Version(int(term), int(version)) if colon and term.isdigit() and version.isdigit() else None


class ExternalSample:
    """One sample of a request, as reported so far.

    Every event has the label of the weights that were served when it was reported. When the label changes, tokens since
    the last event may come from either version; they get the older one, so that no token counts as fresher than it is.
    A streamed request has an event for each token, so at most `late` tokens are uncertain.
    """

    def __init__(
        self,
        index: int,
        style: EventStyle,
        weights: Version,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """`weights` are those served when the request was sent."""
        self.ended = False
        self._output = Output(index)
        self._style = style
        self._decode = decode
        self._weights = weights
        self._older = weights
        self._uncertain_until = 0
        self._delivered = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that were reported."""
        return len(self._output.tokens)

    def take(self, event: dict[str, Any]) -> None:
        """Add an event. Raises ServerGone if the server lost its weights, ChildRequestError if it failed the sample."""
        count, output, meta = len(self._output.tokens), self._output, event["meta_info"]
        tokens: list[int] = event["output_ids"]
        logprobs: list[list[Any]] = meta.get("output_token_logprobs", [])
        if not self._style.incremental:
            tokens, logprobs = tokens[count:], logprobs[count:]
        if len(tokens) != len(logprobs):
            raise ServerGone(f"the server reports {len(tokens)} tokens and {len(logprobs)} log-probs")
        weights = parse_label(meta["weight_version"])
        if weights is None:
            raise ServerGone(f"the server serves weights {meta['weight_version']!r}, which relaxd did not give it")
        if weights != self._weights:
            self._older, self._weights = self._weights, weights
            self._uncertain_until = count + self._style.late + (self._style.interval - 1 if count else 0)
            output.spans_weight_update = True
        for place, (token, entry) in enumerate(zip(tokens, logprobs, strict=True), count):
            output.tokens.append(token)
            output.logprobs.append(entry[0])
            output.versions.append((self._older if place < self._uncertain_until else weights).version)
        finish = meta["finish_reason"]
        if finish is not None:
            if finish["type"] == "abort" and finish.get("status_code"):
                raise ChildRequestError("EngineError", f"the server failed a sample: {finish.get('message')}", {})
            self.end(cast(FinishReason, finish["type"]))

    def end(self, reason: FinishReason) -> None:
        """End the sample."""
        output = self._output
        output.finish_reason, self.ended = reason, True
        output.text = self._decode(output.tokens[:-1] if reason == "stop" else output.tokens)

    def undelivered(self) -> Output:
        """Return what was not delivered yet, and mark it as delivered."""
        start, output = self._delivered, self._output
        self._delivered = len(output.tokens)
        return Output(
            output.sample,
            output.tokens[start:],
            output.logprobs[start:],
            output.versions[start:],
            output.finish_reason,
            output.text if self.ended else "",
            output.spans_weight_update if self.ended else False,
        )
