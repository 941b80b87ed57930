"""Server reflection, for grpcurl: v1, and v1alpha for older clients. Their messages are the same on the wire."""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

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
    """protobuf's default pool, which does not find methods, as `grpcurl describe relaxd.v1.Reward.Score` needs."""

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
