"""From what an SGLang server streams about a sample to Outputs, with the weight version of every token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from relaxd.process.child import ChildRequestError
from services.rollout.engines.base import FinishReason, Output, Version
from services.rollout.engines.sglang_server.http import ServerGone

EVENT_TOKENS = 32
"""Tokens of one event of a request that is not itself streamed: fewer would slow the server down, more would leave
more of them undecided at an update (see ExternalSample)."""
ONLY_AT_END = 1 << 30


@dataclass(frozen=True)
class EventStyle:
    """How the server reports."""

    incremental: bool
    """Whether an event has the new tokens only, and not all of the sample's so far."""
    interval: int
    """Tokens of one event. The first token always is an event of its own."""
    late: int
    """Tokens that are reported after an update though older weights made them: 1 where the server's scheduler works on
    a batch while it reports the one before."""


def label(weights: Version) -> str:
    """The server's name for a version."""
    return f"{weights.term}:{weights.version}"


def parse_label(text: object) -> Version | None:
    """The version of a label; None if it is not one of ours."""
    term, colon, version = str(text).partition(":")
    return Version(int(term), int(version)) if colon and term.isdigit() and version.isdigit() else None


class ExternalSample:
    """One sample of a request, as far as it was reported.

    Every event carries the label of the weights that were served when it was reported. Where it is another than
    before, tokens since the last event may be of either; they get the older version, so that none ever counts as
    fresher than it is. A streamed request has an event for each token and leaves at most `late` undecided.
    """

    def __init__(
        self,
        index: int,
        style: EventStyle,
        weights: Version,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """`weights` were served when the request was sent."""
        self.ended = False
        self._output = Output(index)
        self._style = style
        self._decode = decode
        self._weights = weights
        self._older = weights
        self._undecided_until = 0
        self._delivered = 0

    @property
    def tokens(self) -> int:
        """How many were reported."""
        return len(self._output.tokens)

    def take(self, event: dict[str, Any]) -> None:
        """Take in an event. Raises ServerGone when the server lost the weights that it was given, ChildRequestError
        when it gave the sample up."""
        told, output, meta = len(self._output.tokens), self._output, event["meta_info"]
        tokens: list[int] = event["output_ids"]
        logprobs: list[list[Any]] = meta.get("output_token_logprobs", [])
        if not self._style.incremental:
            tokens, logprobs = tokens[told:], logprobs[told:]
        if len(tokens) != len(logprobs):
            raise ServerGone(f"the server reports {len(tokens)} tokens and {len(logprobs)} log-probs")
        weights = parse_label(meta["weight_version"])
        if weights is None:
            raise ServerGone(f"the server serves weights {meta['weight_version']!r}, none that it was given")
        if weights != self._weights:
            self._older, self._weights = self._weights, weights
            self._undecided_until = told + self._style.late + (self._style.interval - 1 if told else 0)
            output.spans_weight_update = True
        for place, (token, entry) in enumerate(zip(tokens, logprobs, strict=True), told):
            output.tokens.append(token)
            output.logprobs.append(entry[0])
            output.versions.append((self._older if place < self._undecided_until else weights).version)
        finish = meta["finish_reason"]
        if finish is not None:
            if finish["type"] == "abort" and finish.get("status_code"):
                raise ChildRequestError("EngineError", f"the server gave a sample up: {finish.get('message')}", {})
            self.end(cast(FinishReason, finish["type"]))

    def end(self, reason: FinishReason) -> None:
        """The sample has ended."""
        output = self._output
        output.finish_reason, self.ended = reason, True
        output.text = self._decode(output.tokens[:-1] if reason == "stop" else output.tokens)

    def undelivered(self) -> Output:
        """What was not handed on yet."""
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
