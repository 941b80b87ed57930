"""Outputs as JSON, small enough for a hundred thousand tokens a second: numbers travel as arrays, not as text."""

from base64 import b64decode, b64encode
from itertools import groupby
from typing import Any

import numpy as np

from services.rollout.engines.base import Output

Words = dict[str, Any]
"""One output as JSON."""


def encode_output(output: Output) -> Words:
    """An output as JSON; what is empty is left out."""
    words: Words = {"sample": output.sample}
    if output.tokens:
        words["tokens"] = _text(np.array(output.tokens, dtype=np.int32))
        words["logprobs"] = _text(np.array(output.logprobs, dtype=np.float32))
        words["versions"] = [[version, len(list(run))] for version, run in groupby(output.versions)]
    if output.finish_reason is not None:
        words["finish_reason"], words["text"], words["spans_weight_update"] = (
            output.finish_reason,
            output.text,
            output.spans_weight_update,
        )
    if output.routed_experts is not None:
        words["routed_experts"] = [list(output.routed_experts.shape), _text(output.routed_experts)]
    return words


def batches(outputs: dict[str, list[Words]], max_bytes: int) -> tuple[list[dict[str, list[Words]]], dict[str, int]]:
    """Divide outputs by request into messages of at most `max_bytes`, in order.

    Returns the messages, and the size of what is too large for any, by request.
    """
    messages: list[dict[str, list[Words]]] = []
    too_large: dict[str, int] = {}
    room = 0
    for request_id, each in outputs.items():
        for words in each:
            size = _size(words)
            if size > max_bytes:
                too_large[request_id] = size
                continue
            if size > room:
                messages.append({})
                room = max_bytes
            messages[-1].setdefault(request_id, []).append(words)
            room -= size
    return messages, too_large


def _size(words: Words) -> int:
    """Most bytes of an output as JSON."""
    arrays = sum(len(words.get(name, "")) for name in ("tokens", "logprobs"))
    text = 6 * len(words.get("text", ""))  # as if each character were escaped
    experts = len(words["routed_experts"][1]) if "routed_experts" in words else 0
    return arrays + text + experts + 48 * len(words.get("versions", ())) + 512


def decode_output(words: Words) -> Output:
    """An output from its JSON."""
    output = Output(
        words["sample"],
        finish_reason=words.get("finish_reason"),
        text=words.get("text", ""),
        spans_weight_update=words.get("spans_weight_update", False),
    )
    if "tokens" in words:
        output.tokens = np.frombuffer(b64decode(words["tokens"]), dtype=np.int32).tolist()
        output.logprobs = np.frombuffer(b64decode(words["logprobs"]), dtype=np.float32).tolist()
        output.versions = [version for version, count in words["versions"] for _ in range(count)]
    if "routed_experts" in words:
        shape, text = words["routed_experts"]
        output.routed_experts = np.frombuffer(b64decode(text), dtype=np.int32).reshape(shape)
    return output


def _text(array: "np.ndarray[Any, Any]") -> str:
    return b64encode(np.ascontiguousarray(array).tobytes()).decode()
