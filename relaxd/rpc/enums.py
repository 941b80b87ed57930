"""Words of the protos' enums, such as "stop" for FINISH_REASON_STOP, for configurations, columns and messages."""

import re
from functools import cache
from typing import Any


@cache
def words(enum: Any) -> dict[int, str]:
    """Return an enum's words by number, such as `words(sample_pb2.FinishReason)`; the word of 0 is ""."""
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.DESCRIPTOR.name).upper() + "_"
    return {value: name.removeprefix(prefix).lower() if value else "" for name, value in enum.items()}


@cache
def numbers(enum: Any) -> dict[str, Any]:
    """Return an enum's numbers by word."""
    return {word: value for value, word in words(enum).items()}
