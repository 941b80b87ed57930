"""Messages as JSON, for pages."""

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from relaxd.rpc.message_parts import words


def plain(message: Message, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return a message's fields by name as values of JSON.

    Enums become words, times Unix seconds, and numbers that aren't finite None. Fields `without` are left out, as are
    those that could be absent and are.
    """
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if field.name not in without and (not field.has_presence or message.HasField(field.name))
    }


def _field(message: Message, field: Any) -> Any:
    """Return a field's value; `field` is its descriptor."""
    value = getattr(message, field.name)
    if not field.is_repeated:
        return _value(value, field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
        return {key: _value(value[key], of_values) for key in sorted(value)}
    return [_value(one, field) for one in value]


def _value(value: Any, field: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return words(field.enum_type)[value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
