"""A child for tests of relaxd.process.child."""

import os
import sys
import threading
import time
from typing import Any

from relaxd.process import frames
from relaxd.process.child_server import ChildServer, HandlerError


def main() -> None:
    released = threading.Event()

    def echo(params: dict[str, Any]) -> dict[str, Any]:
        return params

    def hang(params: dict[str, Any]) -> str:
        released.wait()
        return "released"

    def release(params: dict[str, Any]) -> None:
        released.set()

    def count(params: dict[str, Any]) -> int:
        for number in range(params["to"]):
            server.emit("number", {"number": number})
        return params["to"]

    def refuse(params: dict[str, Any]) -> None:
        raise HandlerError("no", {"field": "x"})

    def fail(params: dict[str, Any]) -> None:
        raise ValueError("bad value 7")

    def die(params: dict[str, Any]) -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(params["code"])

    def repeat(params: dict[str, Any]) -> str:
        return str(params["text"]) * int(params["times"])

    def limit(params: dict[str, Any]) -> None:
        frames.MAX_FRAME_BYTES = params["bytes"]

    def freeze(params: dict[str, Any]) -> None:
        time.sleep(3600)

    handlers = {
        "echo": echo, "hang": hang, "release": release, "count": count,
        "refuse": refuse, "fail": fail, "die": die, "freeze": freeze, "limit": limit, "repeat": repeat,
    }  # fmt: skip
    server = ChildServer(handlers)
    server.serve()


if __name__ == "__main__":
    main()
