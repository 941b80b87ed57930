"""Requests, outputs and errors shared by all engines, their protobuf messages, and the search for stop strings.

Messages carry arrays as bytes.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Literal, Protocol, cast

import numpy as np

from relaxd.config import RolloutConfig
from relaxd.media.prompt_media import NO_MEDIA, PromptMedia
from relaxd.rpc.errors import Aborted, FailedPrecondition, InvalidArgument
from relaxd.rpc.message_parts import numbers, words
from relaxd.v1 import engine_pb2, replica_pb2, rollout_pb2, sample_pb2
from relaxd.weights.receipts import Receipt

FinishReason = Literal["stop", "length", "abort"]
"""Reason why a sample ended, named as in the proto FinishReason; unfinished samples have None."""
PauseMode = Literal["in_place", "retract", "abort", "drain"]
MemoryPart = Literal["weights", "kv_cache"]
"""Name of a part of an engine's memory, which a sleep frees and a wake allocates again."""

MARGIN_SECONDS = 5.0
"""Seconds by which a call's deadline exceeds the deadline that the engine enforces, so that the engine can still
answer."""

PAUSE_MODES: dict[int, PauseMode] = {
    rollout_pb2.PAUSE_MODE_UNSPECIFIED: "in_place",
    rollout_pb2.PAUSE_MODE_IN_PLACE: "in_place",
    rollout_pb2.PAUSE_MODE_ABORT: "abort",
    rollout_pb2.PAUSE_MODE_DRAIN: "drain",
    rollout_pb2.PAUSE_MODE_RETRACT: "retract",
}

MEMORY_PARTS: dict[int, MemoryPart] = {
    rollout_pb2.MEMORY_PART_WEIGHTS: "weights",
    rollout_pb2.MEMORY_PART_KEY_VALUE_CACHE: "kv_cache",
}


class EngineError(FailedPrecondition):
    """The engine's current state does not allow the operation."""


class BadManifest(InvalidArgument):
    """The engine can't receive the tensors that a weight group's manifest lists."""

    def __init__(self, message: str) -> None:
        super().__init__(message, [("manifest", message)])


class RequestFailed(Aborted):
    """A request to an engine failed; the engine continues with others."""


class AnswerTooLarge(RequestFailed):
    """An answer is too large for a message. A retry doesn't help."""


class WrongMedia(InvalidArgument, RequestFailed):
    """The media of a request can't be used. A retry doesn't help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, [("media", message)])


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request: those of the proto SamplingParams, with defaults filled in."""

    max_new_tokens: int
    temperature: float = 1.0
    """Temperature of sampling. With 0, the likeliest token is always taken."""
    top_p: float = 1.0
    """Total probability of the likeliest tokens among which one is drawn; 1 means all tokens."""
    top_k: int = 0
    """Number of the likeliest tokens among which one is drawn; 0 means all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids of the tokens that end a sample; if empty, the model's own end tokens."""
    ignore_eos: bool = False
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end a sample once it has `min_new_tokens` tokens."""
    min_new_tokens: int = 0

    @classmethod
    def from_proto(cls, message: sample_pb2.SamplingParams) -> "Sampling":
        """Return the sampling parameters of a message, with its defaults filled in."""
        return cls(
            max_new_tokens=message.max_new_tokens,
            temperature=message.temperature,
            top_p=message.top_p or 1.0,
            top_k=message.top_k,
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            seed=message.seed,
            stop=tuple(message.stop),
            min_new_tokens=message.min_new_tokens,
        )

    def to_proto(self) -> sample_pb2.SamplingParams:
        """Return the message from which `from_proto` makes these parameters."""
        return sample_pb2.SamplingParams(**asdict(self))


def run_sampling(config: RolloutConfig, seed: int, own: Mapping[str, Any] | None = None) -> Sampling:
    """Return a group's sampling parameters: the run's, changed by those that the group's data source sets (`own`: JSON
    values by name)."""
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        min_new_tokens=config.min_new_tokens,
        seed=seed,
    )
    changes: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in (own or {}).items()}
    return replace(sampling, **changes)


@dataclass(frozen=True)
class Request:
    """A request to an engine to generate n samples of one prompt."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    n: int
    sampling: Sampling
    stream: bool = False
    """True if tokens are reported while they are generated; False if each sample is reported at its end."""
    report_every: int = 1
    """With `stream`: minimum number of tokens in each report of a sample, except the last."""
    begun: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Earlier tokens of the samples to continue, by index. They count towards length and stop conditions and are not
    reported again. Only these samples are generated; without any, all n samples are generated from their beginning."""
    likeliest: int = 0
    """Number of the likeliest tokens that are reported at each position; 0 for none."""
    media: PromptMedia = NO_MEDIA
    """Media of the prompt. `prompt_tokens` contains the media's tokens, too."""

    @property
    def samples(self) -> tuple[int, ...]:
        """Indices of the samples that the request generates."""
        return tuple(self.begun) or tuple(range(self.n))

    def tokens_of(self, sample: int) -> tuple[int, ...]:
        """Return the tokens that a sample had before this request; () if it had none."""
        return self.begun.get(sample, ())


@dataclass
class Output:
    """An engine's output for one sample: the tokens since its last output, or all tokens if the request does not
    stream.

    Engines fill the fields with lists. In the service's process the fields are arrays: versions int64, logprobs
    float32, others int32.
    """

    sample: int
    tokens: Sequence[int] = field(default_factory=list)
    logprobs: Sequence[float] = field(default_factory=list)
    """Log-prob of each token at the sampling temperature (1 for greedy), before top-p and top-k."""
    versions: Sequence[int] = field(default_factory=list)
    """Version of the weights that produced each token."""
    finish_reason: FinishReason | None = None
    """Reason why the sample ended; None except in the sample's last output."""
    text: str = ""
    """Text of the whole sample, including tokens of earlier requests; empty except in the sample's last output."""
    spans_weight_update: bool = False
    """True if the sample continued in place across a weight update, with its old keys and values."""
    routed_experts: "np.ndarray[Any, Any] | None" = None
    """Experts that each token was routed to, uint8 or uint16 [prompt and answer tokens except the last, layers, top_k].
    Only in the sample's last output, if the run returns them."""
    receipts: Sequence[Receipt] = ()
    """Receipts for the weights that produced the output's tokens."""
    likeliest: Sequence[Sequence[int]] = field(default_factory=list)
    """Ids of the likeliest tokens at each position, likeliest first, whatever the sampling parameters: [tokens,
    Request.likeliest]."""


@dataclass(frozen=True)
class Version:
    """Identity of weights: the training step that produced them (`version`) and the trainer's `term`."""

    term: int
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of term {self.term}"

    @classmethod
    def from_proto(cls, message: replica_pb2.WeightVersion) -> "Version":
        """Return the version in a WeightVersion message."""
        return cls(message.term, message.version)

    def to_proto(self) -> replica_pb2.WeightVersion:
        """Return the version as a WeightVersion message."""
        return replica_pb2.WeightVersion(term=self.term, version=self.version)


class HeldWeights(Protocol):
    """State of an engine's weights that `check_named` needs."""

    weights: Version | None
    """Version of the weights that were committed last; None before the first commit."""
    quarantined: bool
    """True if the engine is in quarantine: it must not generate with its weights."""
    unconfirmed: bool
    """True if the weights were received without a resume, and no resume has named them yet."""


def check_named(named: Version | None, engine: HeldWeights) -> None:
    """Raise EngineError if an engine can't resume. `named`: the weights that the resume request names, or None."""
    held = engine.weights
    if named is not None and (named != held or engine.quarantined):
        state = "is quarantined" if engine.quarantined else f"has {held or 'no weights'}"
        raise EngineError(f"the resume names {named}, but the engine {state}: send the weights again")
    if named is None and engine.unconfirmed and not engine.quarantined:
        raise EngineError(f"the engine received {held}, which the resume doesn't name: it serves nothing")


OutputHandler = Callable[[str, list[Output]], None]
"""Function that gets a request's id and new outputs of its samples. Called in the engine's thread."""


class FailureHandler(Protocol):
    """Function that gets the id of a failed request, and the reason."""

    def __call__(self, request_id: str, reason: str, *, wrong_media: bool = False) -> None:
        """`wrong_media` is True if the request's media can't be used."""


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to the beginning of its last stop string; the whole text if it has none."""
    return text[: max((found for each in stop if (found := text.rfind(each)) >= 0), default=len(text))]


def end_across(
    tokens: Sequence[int],
    begun: int,
    checked: int,
    stop: Collection[str],
    min_tokens: int,
    decode: Callable[[list[int]], str],
) -> tuple[int, str] | None:
    """Find a stop string that begins in an answer's earlier tokens and ends in those of the request.

    SGLang searches only the tokens that a request generates. Returns the number of tokens up to the string's end, and
    the string; None if there is no such string.

    Args:
        tokens: all tokens of the answer so far.
        begun: number of tokens from before the request; no stop string ended in them.
        checked: number of tokens that the caller has searched already; at least `begun`.
        stop: stop strings.
        min_tokens: minimum tokens of an answer.
        decode: function that returns the text of tokens.
    """
    if not begun or not stop:
        return None
    # A token has at least one byte, so such a string spans at most `longest` tokens.
    longest = max(len(each.encode()) for each in stop)
    first = max(0, begun - longest)
    for count in range(max(checked + 1, min_tokens), min(len(tokens), begun + longest) + 1):
        text = decode(list(tokens[first:count]))
        for each in stop:
            if each in text:
                return count, each
    return None


FINISH_WORDS = words(sample_pb2.FinishReason)
FINISH_NUMBERS = numbers(sample_pb2.FinishReason)


def encode_output(request_id: str, output: Output) -> engine_pb2.EngineOutput:
    """Convert a sample's output to a message for the service."""
    runs = [(version, sum(1 for _ in run)) for version, run in groupby(output.versions)]
    message = engine_pb2.EngineOutput(
        request_id=request_id,
        sample=output.sample,
        tokens=np.array(output.tokens, dtype=np.int32).tobytes(),
        logprobs=np.array(output.logprobs, dtype=np.float32).tobytes(),
        versions=[version for version, _ in runs],
        version_lengths=[length for _, length in runs],
        finish_reason=FINISH_NUMBERS[output.finish_reason or ""],
        text=output.text,
        spans_weight_update=output.spans_weight_update,
        likeliest=np.array(output.likeliest, dtype=np.int32).tobytes(),
    )
    if output.routed_experts is not None:
        message.routed_experts = output.routed_experts.tobytes()
        message.routed_experts_shape.extend(output.routed_experts.shape)
    return message


def decode_output(message: engine_pb2.EngineOutput) -> Output:
    """Convert an engine's message to a sample's output, whose fields are arrays."""
    versions = np.repeat(np.array(message.versions, dtype=np.int64), np.array(message.version_lengths, dtype=np.int64))
    output = Output(
        message.sample,
        np.frombuffer(message.tokens, dtype=np.int32),  # type: ignore[arg-type]
        np.frombuffer(message.logprobs, dtype=np.float32),  # type: ignore[arg-type]
        versions,  # type: ignore[arg-type]
        cast(FinishReason | None, FINISH_WORDS[message.finish_reason] or None),
        message.text,
        message.spans_weight_update,
    )
    if message.likeliest:
        likeliest = np.frombuffer(message.likeliest, dtype=np.int32)
        output.likeliest = likeliest.reshape(len(output.tokens), -1)  # type: ignore[assignment]
    if message.routed_experts_shape:
        shape = tuple(message.routed_experts_shape)
        dtype = np.uint16 if len(message.routed_experts) > math.prod(shape) else np.uint8
        output.routed_experts = np.frombuffer(message.routed_experts, dtype=dtype).reshape(shape)
    return output


def join_outputs(outputs: Iterable[tuple[str, Output]]) -> list[tuple[str, Output]]:
    """Join all outputs of the same sample to one, keeping the tokens' order."""
    parts: dict[tuple[str, int], list[Output]] = {}
    for request_id, output in outputs:
        parts.setdefault((request_id, output.sample), []).append(output)
    return [(request_id, _joined(of_sample)) for (request_id, _), of_sample in parts.items()]


def _joined(outputs: list[Output]) -> Output:
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    return replace(
        last,
        tokens=list(chain.from_iterable(output.tokens for output in outputs)),
        logprobs=list(chain.from_iterable(output.logprobs for output in outputs)),
        versions=list(chain.from_iterable(output.versions for output in outputs)),
        likeliest=list(chain.from_iterable(output.likeliest for output in outputs)),
    )


def pack_messages(
    outputs: Iterable[engine_pb2.EngineOutput], message_bytes: int, max_bytes: int
) -> list[engine_pb2.ExchangeResponse]:
    """Pack outputs into messages, in order. Each message has at most `message_bytes`, or a single larger output.

    An output above `max_bytes` becomes a failure of its request, because no message can carry it.
    """
    messages: list[engine_pb2.ExchangeResponse] = []
    room = 0
    for output in outputs:
        size = output.ByteSize()
        if size > max_bytes:
            reason = f"one answer is a message of {size} bytes; at most {max_bytes} are allowed"
            failure = engine_pb2.EngineFailure(request_id=output.request_id, reason=reason, too_large=True)
            messages.append(engine_pb2.ExchangeResponse(failures=[failure]))
            room = 0
            continue
        if size > room:
            messages.append(engine_pb2.ExchangeResponse())
            room = message_bytes
        messages[-1].outputs.append(output)
        room -= size
    return messages


def encode_request(request: Request) -> engine_pb2.EngineRequest:
    """Convert a request to a message for the engine's process."""
    return engine_pb2.EngineRequest(
        id=request.request_id,
        request=rollout_pb2.GenerateRequest(
            prompt_tokens=request.prompt_tokens,
            n=request.n,
            sampling=request.sampling.to_proto(),
            final_only=not request.stream,
            media=request.media.to_proto(),
            media_contents=request.media.contents,
        ),
        begun=[
            engine_pb2.BegunSample(sample=sample, tokens=np.array(tokens, dtype=np.int32).tobytes())
            for sample, tokens in request.begun.items()
        ],
        report_every=request.report_every,
        likeliest=request.likeliest,
    )


def decode_request(message: engine_pb2.EngineRequest) -> Request:
    """Convert a message from the service to a request."""
    asked = message.request
    return Request(
        message.id,
        tuple(asked.prompt_tokens),
        asked.n,
        Sampling.from_proto(asked.sampling),
        stream=not asked.final_only,
        report_every=message.report_every,
        begun={each.sample: tuple(np.frombuffer(each.tokens, dtype=np.int32).tolist()) for each in message.begun},
        likeliest=message.likeliest,
        media=PromptMedia.from_proto(asked),
    )
