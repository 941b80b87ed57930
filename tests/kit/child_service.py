"""A service of google.protobuf.Struct for child processes of tests, written by hand."""

from collections.abc import Callable, Collection
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

SERVICE = "relaxd.test.Child"


class ChildStub:
    """A stub that knows any method."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, method: str) -> Any:
        return self._channel.unary_unary(f"/{SERVICE}/{method}", Struct.SerializeToString, Struct.FromString)

    def stream(self, method: str) -> Any:
        """A method that answers with a stream."""
        return self._channel.unary_stream(f"/{SERVICE}/{method}", Struct.SerializeToString, Struct.FromString)

    def stream_stream(self, method: str) -> Any:
        """A method that answers each request of a stream."""
        return self._channel.stream_stream(f"/{SERVICE}/{method}", Struct.SerializeToString, Struct.FromString)


def add_methods(
    unary: Collection[str], streaming: Collection[str] = (), in_turn: Collection[str] = ()
) -> Callable[[Any, Any], None]:
    """What a generated add_<Name>Servicer_to_server does, for these methods."""
    kinds = {"request_deserializer": Struct.FromString, "response_serializer": Struct.SerializeToString}

    def add(servicer: Any, server: grpc.aio.Server) -> None:
        handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name), **kinds) for name in unary}
        for name in streaming:
            handlers[name] = grpc.unary_stream_rpc_method_handler(getattr(servicer, name), **kinds)
        for name in in_turn:
            handlers[name] = grpc.stream_stream_rpc_method_handler(getattr(servicer, name), **kinds)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    return add


def struct(**values: Any) -> Struct:
    made = Struct()
    made.update(values)
    return made
