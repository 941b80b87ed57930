"""The connections of one board: to its own Redis, and to the data nodes that have its large payloads."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from relaxd.board.errors import BoardError
from relaxd.redis_client.moves import At

Connection = TypeVar("Connection")


class Servers(Generic[Connection]):
    """Connections by what moves call their servers."""

    def __init__(self, connect: Callable[[str], Connection], board: Connection, urls: Sequence[str]) -> None:
        """`urls`: board.data_urls."""
        self._connect = connect
        self.board = board
        self.data = tuple(connect(url) for url in urls)
        self._named = dict(zip(urls, self.data, strict=True))

    def at(self, server: At) -> Connection:
        """Return the connection to a server. Raises BoardError: there is no data node of this number."""
        if server is None:
            return self.board
        if isinstance(server, str):
            if server not in self._named:
                self._named[server] = self._connect(server)
            return self._named[server]
        if server >= len(self.data):
            raise BoardError(f"a payload is on data node {server}, but board.data_urls has {len(self.data)}")
        return self.data[server]

    @property
    def every(self) -> tuple[Connection, ...]:
        """All connections, the board's first."""
        return (self.board, *self._named.values())
