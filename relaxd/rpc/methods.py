"""Options of the methods in the protos: the access that each needs, and whether gRPC may retry it."""

from collections.abc import Iterator

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions

from relaxd.v1 import (
    access_pb2,
    advantage_pb2,
    coordinator_pb2,
    launcher_pb2,
    replica_pb2,
    reward_pb2,
    rollout_pb2,
    trainer_pb2,
    trainer_rank_pb2,
)

_FILES = (
    advantage_pb2,
    coordinator_pb2,
    launcher_pb2,
    replica_pb2,
    reward_pb2,
    rollout_pb2,
    trainer_pb2,
    trainer_rank_pb2,
)


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
