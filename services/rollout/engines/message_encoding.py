"""Requests and outputs as messages between the rollout service and an engine's process. Arrays are bytes."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, groupby
from typing import cast

import numpy as np

from relaxd.media.prompt_media import PromptMedia
from relaxd.rpc.message_parts import numbers, words
from relaxd.v1 import engine_pb2, rollout_pb2, sample_pb2
from services.rollout.engines.request_types import FinishReason, Output, Request, Sampling

FINISH_WORDS = words(sample_pb2.FinishReason)
FINISH_NUMBERS = numbers(sample_pb2.FinishReason)


def encode_output(request_id: str, output: Output) -> engine_pb2.EngineOutput:
    """Convert an output to a message."""
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
    """Convert a message to an output with arrays."""
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
    """Join the outputs of each sample, in order."""
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
    """Pack outputs, in order, into messages of at most `message_bytes`; a larger output gets its own message.

    The request of an output above `max_bytes`, which no message can carry, fails.
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
    """Convert a request to a message."""
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
    """Convert a message to a request."""
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
