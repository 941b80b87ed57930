"""Methods of the protos, read from their descriptors: who may call them, whether gRPC may retry, whether they need a
term; and server reflection.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from relaxd.roles import COORDINATOR
from relaxd.v1 import (
    access_pb2,
    advantage_pb2,
    agent_pb2,
    coordinator_pb2,
    engine_pb2,
    external_scaler_pb2,
    judge_pb2,
    launcher_pb2,
    rank_pb2,
    ranks_pb2,
    replica_pb2,
    reward_pb2,
    reward_worker_pb2,
    rollout_pb2,
    trainer_pb2,
)

_FILES = (
    advantage_pb2,
    agent_pb2,
    coordinator_pb2,
    engine_pb2,
    external_scaler_pb2,
    judge_pb2,
    launcher_pb2,
    ranks_pb2,
    replica_pb2,
    reward_pb2,
    reward_worker_pb2,
    rollout_pb2,
    trainer_pb2,
    rank_pb2,
)
_WORK = ("/relaxd.v1.Agent/Converse", "/relaxd.v1.Reward/Score", "/relaxd.v1.Rollout/Generate")
"""Calls of the coordinator that change only a replica's load."""


def methods() -> Iterator[MethodDescriptor]:
    """Yield every method of every relaxd service."""
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def callers(method: MethodDescriptor) -> tuple[str, ...]:
    """Return the owners of tokens that allow a method (protos/relaxd/v1/access.proto); empty if its proto names
    none."""
    return tuple(method.GetOptions().Extensions[access_pb2.callers])


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


_ORDERS = frozenset(path(method) for method in methods() if callers(method) == (COORDINATOR,)).difference(_WORK)


def needs_term(method_path: str) -> bool:
    """Return whether a method is an order to a replica or launcher. Orders must carry a coordinator's term."""
    return method_path in _ORDERS


SERVICES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


def enable_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Answer reflection calls about the services `names`."""
    pool = _MethodFindingPool()
    servicer = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME], pool=pool)  # type: ignore[attr-defined]
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    # grpcio-reflection has no v1.
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICES[0], {"ServerReflectionInfo": handler}),)
    )


class _MethodFindingPool:
    """protobuf's default pool, extended to find methods, as `grpcurl describe relaxd.v1.Reward.Score` needs."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._pool.FindServiceByName(service)
            if method not in found.methods_by_name:
                raise
            return found.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
