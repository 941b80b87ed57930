"""A child for tests of relaxd.process.child: a service of Structs, written by hand."""

import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.struct_pb2 import Struct

from relaxd.process.child_server import AndThen, ChildServer, Outbox, in_turn
from relaxd.rpc.errors import InvalidArgument
from tests.kit.child_service import add_methods, struct

UNARY = (
    *("echo", "hang", "release", "refuse", "fail", "die", "freeze", "repeat", "seconds_left", "thread"),
    *("wait_asked", "wait_followed"),
)
add_echo = add_methods(UNARY, ["count"], ["each", "answer_first"])


class Echo:
    """The service."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.asked = threading.Event()
        self.followed = threading.Event()

    def echo(self, request: Struct, context: Any) -> Struct:
        return request

    def hang(self, request: Struct, context: Any) -> Struct:
        self.released.wait()
        return struct(answer="released")

    def release(self, request: Struct, context: Any) -> Struct:
        self.released.set()
        return Struct()

    @in_turn
    def answer_first(self, request: Struct, context: Any) -> AndThen:
        def then() -> None:
            self.released.wait()
            self.followed.set()

        self.asked.set()
        if "hang" in request:
            self.released.wait()
        return AndThen(struct(), then)

    def wait_asked(self, request: Struct, context: Any) -> Struct:
        self.asked.wait()
        return struct()

    def wait_followed(self, request: Struct, context: Any) -> Struct:
        self.followed.wait()
        return struct()

    @in_turn
    def each(self, request: Struct, context: Any) -> Struct:
        """Do what another method does, and say in which stream."""
        answer = getattr(self, str(request["do"]))(request, context) if "do" in request else Struct()
        answer.update({"stream": id(context)})
        return answer

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

    def thread(self, request: Struct, context: Any) -> Struct:
        thread = threading.current_thread()
        return struct(name=thread.name, id=thread.native_id, threads=threading.active_count())


if __name__ == "__main__":
    ChildServer((add_echo, Echo())).serve()
