"""Data nodes of a job: servers for its large columns, each behind a link that all services share."""

from pathlib import Path

import redis

from tests.chaos.proxy import Link, Loop
from tests.kit.ports import free_port
from tests.kit.redis.redis_server import RedisServer

NODES = 2


class DataNodes:
    """The servers and their links."""

    def __init__(self, folder: Path, loop: Loop, password: str) -> None:
        """They keep their files in the folder. The links are in the loop; the password is that of the board's Redis."""
        self.servers: list[RedisServer] = []
        self.links: list[Link] = []
        self._loop = loop
        for number in range(NODES):
            (place := folder / f"data-node-{number}").mkdir(parents=True, exist_ok=True)
            self.servers.append(RedisServer(place, append_only=True, password=password))
            self.links.append(Link(f"services > data-node-{number}", free_port(), self.servers[-1].port, to_redis=True))
        self.clients = [redis.Redis.from_url(server.url, socket_timeout=30.0) for server in self.servers]
        """Connections that don't go through the links."""

    @property
    def urls(self) -> list[str]:
        """The value of board.data_urls."""
        return [f"redis://127.0.0.1:{link.port}/0" for link in self.links]

    def start(self) -> None:
        """Start the servers and listen."""
        for server, link in zip(self.servers, self.links, strict=True):
            server.start()
            self._loop.do(link.start())

    def stop(self) -> None:
        """End the servers."""
        for client, server in zip(self.clients, self.servers, strict=True):
            client.close()
            server.stop()
