"""JSON forms of messages, for the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from relaxd.rpc.message_parts import words
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.replica_pb2 import ReplicaState

SILENT_SECONDS = 3.0
"""Time without a heartbeat from which on the page shows it."""


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


def numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Return the finite numbers among values by name: JSON has no others."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def fleet_form(replicas: Sequence[pb.RegisteredReplica]) -> dict[str, list[Any]]:
    """Return a column for each fact about all replicas, short enough for hundreds of them every few seconds."""
    states = words(ReplicaState)
    return {
        "id": [one.registration.replica_id for one in replicas],
        "role": [one.registration.role for one in replicas],
        "state": [states[one.status.state] for one in replicas],
        "version": [one.status.weights.version if one.status.HasField("weights") else None for one in replicas],
        "held": [one.status.held_groups for one in replicas],
        "done": [one.status.done_groups for one in replicas],
        "gpus": [len(one.leased_gpu_uuids) for one in replicas],
        "silent": [round(one.heartbeat_age_seconds) * (one.heartbeat_age_seconds > SILENT_SECONDS) for one in replicas],
    }
