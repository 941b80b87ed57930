"""Requests as messages to an engine's process."""

import numpy as np

from relaxd.v1 import engine_pb2, rollout_pb2
from services.rollout.engines.types import Request, Sampling


def encode_request(request: Request) -> engine_pb2.EngineRequest:
    """Convert a request to a message."""
    return engine_pb2.EngineRequest(
        id=request.request_id,
        request=rollout_pb2.GenerateRequest(
            prompt_tokens=request.prompt_tokens,
            n=request.n,
            sampling=request.sampling.to_proto(),
            final_only=not request.stream,
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
    )
