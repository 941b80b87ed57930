"""Samples of an external server: its stream events as Outputs, with the weight version of every token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from services.rollout.engines.request_types import (
    FinishReason,
    Output,
    RequestFailed,
    Sampling,
    Version,
    cut_at_stop,
    end_across,
)
from services.rollout.engines.sglang_external.server_client import ServerGone

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
    """Tokens per event. The first token always has a separate event."""
    late: int
    """Number of tokens of older weights that are reported after an update: 1 if the server's scheduler overlaps a batch
    with reporting the previous one."""


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
        begun: Sequence[int] = (),
        sampling: Sampling | None = None,
    ) -> None:
        """`weights` are those served when the request was sent, `begun` the tokens that the sample had before.

        `sampling` says where stop strings end it that begin in those tokens.
        """
        self.ended = False
        self.ended_here = False
        """True if the sample ended at a stop string that the server didn't notice."""
        self._begun = len(begun)
        self._sampling = sampling
        self._tokens: list[int] = list(begun)
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._output = Output(index, self._tokens, self._logprobs, self._versions)
        self._style = style
        self._decode = decode
        self._weights = weights
        self._older = weights
        self._uncertain_until = 0
        self._delivered = 0
        """Number of new tokens that were delivered."""

    @property
    def index(self) -> int:
        """Index of the sample in its request."""
        return self._output.sample

    @property
    def tokens(self) -> int:
        """Number of new tokens that were reported."""
        return len(self._logprobs)

    @property
    def undelivered_tokens(self) -> int:
        """Number of new tokens that were not delivered yet."""
        return len(self._logprobs) - self._delivered

    def take(self, event: dict[str, Any]) -> None:
        """Add an event. Raises ServerGone if the server lost its weights, RequestFailed if it failed the sample."""
        count, output, meta = len(self._logprobs), self._output, event["meta_info"]
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
            self._tokens.append(token)
            self._logprobs.append(entry[0])
            self._versions.append((self._older if place < self._uncertain_until else weights).version)
        if self._ends_across(self._begun + count):
            return
        finish = meta["finish_reason"]
        if finish is not None:
            if finish["type"] == "abort" and finish.get("status_code"):
                raise RequestFailed(f"the server failed a sample: {finish.get('message')}")
            self.end(cast(FinishReason, finish["type"]), finish.get("matched"))

    def _ends_across(self, checked: int) -> bool:
        """End the sample at a stop string that ends in the new tokens but began before them."""
        sampling = self._sampling
        if sampling is None:
            return False
        stop, least = sampling.stop, sampling.min_new_tokens
        found = end_across(self._tokens, self._begun, checked, stop, least, self._decode)
        if found is None:
            return False
        length, matched = found
        new = length - self._begun
        del self._tokens[length:], self._logprobs[new:], self._versions[new:]
        self.ended_here = True
        self.end("stop", matched)
        return True

    def end(self, reason: FinishReason, matched: int | str | None = None) -> None:
        """End the sample. `matched`: the end token or stop string that ended it."""
        output = self._output
        output.finish_reason, self.ended = reason, True
        if isinstance(matched, str):
            output.text = cut_at_stop(self._decode(output.tokens), [matched])
        else:
            output.text = self._decode(output.tokens[:-1] if reason == "stop" else output.tokens)

    def undelivered(self) -> Output:
        """Return undelivered output, and mark it as delivered."""
        start, output = self._delivered, self._output
        self._delivered = len(self._logprobs)
        return Output(
            output.sample,
            output.tokens[self._begun + start :],
            output.logprobs[start:],
            output.versions[start:],
            output.finish_reason,
            output.text if self.ended else "",
            output.spans_weight_update,
        )
