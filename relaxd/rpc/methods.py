"""Properties of methods, read from the protos: required access, whether gRPC may retry, whether a term is required."""

from collections.abc import Iterator

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions

from relaxd.v1 import (
    access_pb2,
    advantage_pb2,
    coordinator_pb2,
    engine_pb2,
    judge_pb2,
    launcher_pb2,
    rank_pb2,
    replica_pb2,
    reward_pb2,
    reward_worker_pb2,
    rollout_pb2,
    trainer_pb2,
)

_FILES = (
    advantage_pb2,
    coordinator_pb2,
    engine_pb2,
    judge_pb2,
    launcher_pb2,
    replica_pb2,
    reward_pb2,
    reward_worker_pb2,
    rollout_pb2,
    trainer_pb2,
    rank_pb2,
)
_WORK = (
    *("/relaxd.v1.Advantage/Compute", "/relaxd.v1.Judge/Ask", "/relaxd.v1.Reward/Score"),
    "/relaxd.v1.Rollout/Generate",
)
"""Calls that anybody may make of a replica: they change nothing but its load."""


def methods() -> Iterator[MethodDescriptor]:
    """Yield every method of every relaxd service."""
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def access(method: MethodDescriptor) -> int:
    """Return the least that a token must allow for a method; ACCESS_UNSPECIFIED where its proto doesn't say."""
    return int(method.GetOptions().Extensions[access_pb2.access])


def may_repeat(method: MethodDescriptor) -> bool:
    """Return whether gRPC may retry a method on UNAVAILABLE: a unary read, or one that its proto calls idempotent.

    A blanket retry would carry a request that kills a replica to the next one.
    """
    return not method.server_streaming and method.GetOptions().idempotency_level in (
        MethodOptions.NO_SIDE_EFFECTS,
        MethodOptions.IDEMPOTENT,
    )


def path(method: MethodDescriptor) -> str:
    """Return a method's path, such as "/relaxd.v1.Reward/Score"."""
    return f"/{method.containing_service.full_name}/{method.name}"


_ORDERS = frozenset(
    path(method)
    for method in methods()
    if access(method) == access_pb2.ACCESS_SERVICE and method.containing_service.name != "Coordinator"
).difference(_WORK)


def needs_term(method_path: str) -> bool:
    """Return whether a method is an order to a replica or launcher, which must carry a coordinator's term."""
    return method_path in _ORDERS
