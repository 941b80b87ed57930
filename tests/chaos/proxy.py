"""TCP links that can be cut, delayed, made to swallow everything, or cut at one command to Redis: between two services.

All links and relays of a test live in the event loop of one thread, so that nothing else that the test does slows them.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from tests.chaos.commands import CommandStream

Moment = Literal["before", "after"]
"""A command has not been passed on; it has been, and its reply is not passed back."""
Result = TypeVar("Result")
CHUNK = 1 << 16
MAX_QUEUED = 256
"""Chunks on their way in one direction before the sender has to wait."""
CONNECT_SECONDS = 5.0
HOST = "127.0.0.1"


class Loop:
    """An event loop in a thread of its own. A context manager."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="network", daemon=True)

    def __enter__(self) -> "Loop":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.do(cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, Result], seconds: float = 10.0) -> Result:
        """Run a coroutine in the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)


class Link:
    """A port of our own that leads to another one. Methods are coroutines of the loop."""

    def __init__(self, name: str, port: int, target: int, *, to_redis: bool = False) -> None:
        """`to_redis`: what it carries are commands, and `arm` works."""
        self.name = name
        self.port = port
        self.target = target
        self.bytes = 0
        """Bytes that arrived here, in both directions."""
        self._is_cut = False
        self._delay = 0.0
        self._dropping = False
        self._to_redis = to_redis
        self._triggers: dict[tuple[str, Moment], Callable[[], None]] = {}
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, HOST, self.port)

    async def cut(self) -> None:
        """Reset every connection, and every new one at once."""
        self._is_cut = True
        self._reset(self._connections)

    async def reset(self) -> None:
        """Reset every connection; new ones are fine."""
        self._reset(self._connections)

    async def delay(self, seconds: float) -> None:
        """Let everything arrive so much later, in each direction."""
        self._delay = seconds

    async def drop(self) -> None:
        """Swallow everything without a word; connections stay."""
        self._dropping = True

    async def restore(self) -> None:
        """Be a good link again. Connections of which something was swallowed are reset: nothing sends it again."""
        self._is_cut = self._dropping = False
        self._delay = 0.0
        self._reset({connection for connection in self._connections if connection.lost})

    async def arm(self, pattern: str, moment: Moment, action: Callable[[], None] = lambda: None) -> None:
        """Break the connection of the next command whose name matches (tests.chaos.commands), and do `action` once.

        The action comes first, once Redis is done with all that was passed on. Raises ValueError: nobody watches here.
        """
        if not self._to_redis:
            raise ValueError(f"{self.name} carries no commands to Redis: it can't be armed with {pattern!r}")
        self._triggers[pattern, moment] = action

    async def disarm(self) -> None:
        """Forget what was armed."""
        self._triggers.clear()

    def _struck(self, name: str, moment: Moment) -> Callable[[], None] | None:
        """Return the action for a command, and forget it."""
        for pattern, when in self._triggers:
            if when == moment and fnmatchcase(name, pattern):
                return self._triggers.pop((pattern, when))
        return None

    def _watch(self, connection: "_Connection", data: bytes) -> bytes:
        """Return what may be passed on: complete commands, up to the one that a trigger waits for."""
        passed = []
        for command in connection.commands.feed(data):
            if action := self._struck(command.name, "before"):
                connection.strike = action
                break
            passed.append(command.data)
            if action := self._struck(command.name, "after"):
                connection.strike = action
                break
        return b"".join(passed)

    def _reset(self, connections: "set[_Connection]") -> None:
        for connection in set(connections):
            connection.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near = _Connection([writer])
        self._connections.add(near)
        try:
            if self._is_cut:
                return
            async with asyncio.timeout(CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
            near.writers.append(far_writer)
            pumps = [
                asyncio.create_task(self._pump(near, reader, far_writer, self._to_redis)),
                asyncio.create_task(self._pump(near, far_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, TimeoutError):
            pass  # nobody listens there: neither do we
        finally:
            near.reset()
            self._connections.discard(near)

    async def _pump(
        self,
        connection: "_Connection",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        watched: bool = False,
    ) -> None:
        """Pass on what comes, each chunk at its time, until one end is gone."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_QUEUED)
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while True:
                due, data = await queue.get()
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        try:
            with contextlib.suppress(ConnectionError):
                while not delivering.done():
                    data = await reader.read(CHUNK)
                    self.bytes += len(data)
                    if self._dropping and data:
                        connection.lost = True
                        continue
                    if connection.strike is not None:  # the other direction: no reply is passed back
                        if data:
                            continue
                        connection.strike()
                        return
                    if watched and data:
                        data = self._watch(connection, data)
                        if connection.strike is not None:
                            await self._end(data, queue, delivering, writer, connection.strike)
                            return
                        if not data:  # of a command that isn't complete
                            continue
                    await queue.put((loop.time() + self._delay, data))
                    if not data:
                        await delivering
                        return
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    async def _end(
        self,
        data: bytes,
        queue: asyncio.Queue[tuple[float, bytes]],
        delivering: asyncio.Task[None],
        writer: asyncio.StreamWriter,
        strike: Callable[[], None],
    ) -> None:
        """Pass the last commands on and hang up. Redis does so, too, once it is done: then the other pump strikes."""
        for last in (data, b"") if data else (b"",):
            await queue.put((0.0, last))
        await delivering
        writer.write_eof()
        await asyncio.sleep(CONNECT_SECONDS)  # brief: the other pump ends this one, unless Redis stands still
        strike()


class _Connection:
    """Both sockets of one connection."""

    def __init__(self, writers: list[asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.lost = False
        self.commands = CommandStream()
        self.strike: Callable[[], None] | None = None
        """What to do when it breaks at the command that was waited for."""

    def reset(self) -> None:
        """End it as a host that died would: with a reset, not in good order."""
        for writer in self.writers:
            own: socket.socket | None = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                if own is not None:
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
