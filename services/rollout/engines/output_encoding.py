"""Outputs as JSON. Numbers are base64 of arrays, because text is too slow for a hundred thousand tokens a second."""

from base64 import b64decode, b64encode
from itertools import groupby
from typing import Any

import numpy as np

from services.rollout.engines.types import Output

EncodedOutput = dict[str, Any]
"""One output as JSON."""


def encode_output(output: Output) -> EncodedOutput:
    """Encode an output; empty fields are left out."""
    encoded: EncodedOutput = {"sample": output.sample}
    if output.tokens:
        encoded["tokens"] = _base64(np.array(output.tokens, dtype=np.int32))
        encoded["logprobs"] = _base64(np.array(output.logprobs, dtype=np.float32))
        encoded["versions"] = [[version, len(list(run))] for version, run in groupby(output.versions)]
    if output.finish_reason is not None:
        encoded["finish_reason"], encoded["text"], encoded["spans_weight_update"] = (
            output.finish_reason,
            output.text,
            output.spans_weight_update,
        )
    if output.routed_experts is not None:
        encoded["routed_experts"] = [list(output.routed_experts.shape), _base64(output.routed_experts)]
    return encoded


def pack_messages(
    outputs: dict[str, list[EncodedOutput]], max_bytes: int
) -> tuple[list[dict[str, list[EncodedOutput]]], dict[str, int]]:
    """Pack the outputs of requests into messages of at most `max_bytes`, in order.

    Returns the messages, and by request the size of an output that is too large for any message.
    """
    messages: list[dict[str, list[EncodedOutput]]] = []
    too_large: dict[str, int] = {}
    room = 0
    for request_id, each in outputs.items():
        for encoded in each:
            size = _size(encoded)
            if size > max_bytes:
                too_large[request_id] = size
                continue
            if size > room:
                messages.append({})
                room = max_bytes
            messages[-1].setdefault(request_id, []).append(encoded)
            room -= size
    return messages, too_large


def _size(encoded: EncodedOutput) -> int:
    """Return an upper bound of an output's bytes as JSON."""
    arrays = sum(len(encoded.get(name, "")) for name in ("tokens", "logprobs"))
    text = 6 * len(encoded.get("text", ""))  # as if each character were escaped
    experts = len(encoded["routed_experts"][1]) if "routed_experts" in encoded else 0
    return arrays + text + experts + 48 * len(encoded.get("versions", ())) + 512


def decode_output(encoded: EncodedOutput) -> Output:
    """Decode an output."""
    output = Output(
        encoded["sample"],
        finish_reason=encoded.get("finish_reason"),
        text=encoded.get("text", ""),
        spans_weight_update=encoded.get("spans_weight_update", False),
    )
    if "tokens" in encoded:
        output.tokens = np.frombuffer(b64decode(encoded["tokens"]), dtype=np.int32).tolist()
        output.logprobs = np.frombuffer(b64decode(encoded["logprobs"]), dtype=np.float32).tolist()
        output.versions = [version for version, count in encoded["versions"] for _ in range(count)]
    if "routed_experts" in encoded:
        shape, text = encoded["routed_experts"]
        output.routed_experts = np.frombuffer(b64decode(text), dtype=np.int32).reshape(shape)
    return output


def _base64(array: "np.ndarray[Any, Any]") -> str:
    return b64encode(np.ascontiguousarray(array).tobytes()).decode()
