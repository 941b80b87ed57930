"""A parent that leaves streams of its child: `python -m tests.integration.rpc.leaving_parent LEFT killed|running`."""

import asyncio
import logging
import sys
from collections.abc import Awaitable
from contextlib import suppress

from relaxd.process.child import Child, ChildExited
from relaxd.process.child_channel import RequestStream
from tests.kit.child_service import ChildStub, struct

kept: list[object] = []


async def until_it_ends(reading: Awaitable[object]) -> None:
    with suppress(ChildExited):
        await reading


async def main(left: str, *, ends: bool) -> None:
    child = await Child.start("tests.integration.rpc.echo_child")
    echo = ChildStub(child.channel)
    if left == "answered":
        kept.append(each := RequestStream(echo.stream_stream("each"), "each"))
        await each.ask(struct(do="echo"), timeout=30)
    if left == "unanswered":
        kept.append(each := RequestStream(echo.stream_stream("each"), "each"))
        kept.append(asyncio.create_task(until_it_ends(each.ask(struct(do="hang"), timeout=None))))
    if left == "unread":
        kept.append(numbers := echo.stream("count")(struct(to=100), timeout=None))
        await anext(numbers)
    if left == "being read":
        kept.append(asyncio.create_task(until_it_ends(anext(echo.stream("count")(struct(to=100), timeout=None)))))
    await echo.echo(struct(), timeout=30)
    if ends:
        child.kill()
        await child.exited


if __name__ == "__main__":
    logging.basicConfig()
    asyncio.run(main(sys.argv[1], ends=sys.argv[2] == "killed"))
