"""A child for tests of relaxd.process.child: a service of Structs, written by hand."""

import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

from relaxd.process.child_server import ChildServer, Outbox
from relaxd.rpc.errors import InvalidArgument

SERVICE = "relaxd.test.Echo"
UNARY = ("echo", "hang", "release", "refuse", "fail", "die", "freeze", "repeat", "seconds_left", "thread_name")


class EchoStub:
    """The stub of the child's service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.count = channel.unary_stream(f"/{SERVICE}/count", Struct.SerializeToString, Struct.FromString)
        for name in (*UNARY, "fly"):
            call = channel.unary_unary(f"/{SERVICE}/{name}", Struct.SerializeToString, Struct.FromString)
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Echo:
    """The service."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def echo(self, request: Struct, context: Any) -> Struct:
        return request

    def hang(self, request: Struct, context: Any) -> Struct:
        self.released.wait()
        return struct(answer="released")

    def release(self, request: Struct, context: Any) -> Struct:
        self.released.set()
        return Struct()

    async def count(self, request: Struct, context: Any) -> AsyncIterator[Struct]:
        outbox: Outbox[float] = Outbox()
        outbox.put(0)

        def emit() -> None:
            for number in range(1, int(request["to"])):
                outbox.put(number)

        threading.Thread(target=emit).start()
        async for number in outbox:
            yield struct(number=number)
            if number + 1 == request["to"]:
                return

    def refuse(self, request: Struct, context: Any) -> Struct:
        raise InvalidArgument("no", [("x", "is wrong")])

    def fail(self, request: Struct, context: Any) -> Struct:
        raise ValueError("bad value 7")

    def die(self, request: Struct, context: Any) -> Struct:
        print("last words", file=sys.stderr, flush=True)
        os._exit(int(request["code"]))

    def repeat(self, request: Struct, context: Any) -> Struct:
        return struct(text=str(request["text"]) * int(request["times"]))

    def freeze(self, request: Struct, context: Any) -> Struct:
        time.sleep(3600)
        return Struct()

    def seconds_left(self, request: Struct, context: Any) -> Struct:
        return struct(seconds=context.time_remaining())

    async def thread_name(self, request: Struct, context: Any) -> Struct:
        return struct(name=threading.current_thread().name)


def struct(**values: Any) -> Struct:
    made = Struct()
    made.update(values)
    return made


def add_echo(servicer: Any, server: grpc.aio.Server) -> None:
    names = {"request_deserializer": Struct.FromString, "response_serializer": Struct.SerializeToString}
    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name), **names) for name in UNARY}
    handlers["count"] = grpc.unary_stream_rpc_method_handler(servicer.count, **names)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


if __name__ == "__main__":
    ChildServer((add_echo, Echo())).serve()
