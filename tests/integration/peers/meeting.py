"""Where the ranks of weight groups meet: the double of a rendezvous store and its collectives."""

import asyncio
import json
import os

from relaxd.rpc.errors import Aborted, DeadlineExceeded

BROADCAST_SECONDS = float(os.environ.get("PEER_BROADCAST_SECONDS", "0.05"))
CHUNKS, CHUNK = 8, 4096
CHECKSUM = 7
"""Of the one tensor that they are taken for."""


class Meeting:
    """Where the ranks of weight groups meet: the double of the trainer's rendezvous store and its collectives."""

    def __init__(self) -> None:
        self.members: dict[str, dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._arrived = asyncio.Event()
        self.port = 0

    async def start(self) -> None:
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        self.members.setdefault(hello["group"], {})[hello["rank"]] = (reader, writer)
        self._arrived.set()

    async def join(self, group: str, world_size: int, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while len(self.members.get(group, {})) < world_size - 1:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"group {group} is not complete") from error
        for _, writer in self.members[group].values():
            writer.write(b"go\n")

    async def broadcast(self, group: str, seconds: float) -> None:
        async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(CHUNKS):
                writer.write(bytes(CHUNK))
                await writer.drain()
                await asyncio.sleep(BROADCAST_SECONDS / CHUNKS)
            if await reader.read(1) != b"k":
                raise Aborted("a member has left")

        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(send(*member) for member in self.members.get(group, {}).values()))
        except TimeoutError as error:
            raise DeadlineExceeded("the broadcast took too long") from error
        except ConnectionError as error:
            raise Aborted(f"a member has left: {error}") from error

    def leave(self, group: str) -> None:
        for _, writer in self.members.pop(group, {}).values():
            writer.close()
