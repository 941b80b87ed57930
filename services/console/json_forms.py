"""JSON forms of messages, for the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from relaxd.rpc.message_parts import words
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.replica_pb2 import ReplicaState

SILENT_SECONDS = 3.0
"""Time without a heartbeat from which on the page shows it."""


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
