"""Asyncio versions of relaxd.redis_client.blocking_client's clients, with the same lookup of servers."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import redis
import redis.asyncio

from relaxd.redis_client.blocking_client import (
    DRIVER,
    TooFewReplicas,
    WriteFence,
    lookup_of,
    mark_address_stale,
    marks,
    without_errors,
)
from relaxd.redis_client.lookups import (
    ELSEWHERE,
    Lookup,
    OwnerLookup,
    check_primary,
    demoted,
    key_prefix,
    mark_key,
    parse,
)

MOST_CONNECTIONS = 1024
"""Maximum number of connections of one Redis client. Callers limit their concurrency themselves."""


class PacksCommands(Protocol):
    """Converts Redis commands to the bytes that are sent."""

    def pack(self, *arguments: Any) -> list[Any]:
        """Return the chunks of bytes to send for a command."""
        ...


class _Packed(redis.asyncio.connection.AbstractConnection):
    """A Redis connection that uses a given packer of commands, for which redis.asyncio has no setting."""

    def __init__(self, *, packer: PacksCommands | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._packer = packer

    def pack_command(self, *arguments: Any) -> list[Any]:
        return super().pack_command(*arguments) if self._packer is None else self._packer.pack(*arguments)

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[Any]:
        """Return the chunks of bytes of several commands that are sent together."""
        if self._packer is None:
            return super().pack_commands(commands)
        return [chunk for command in commands for chunk in self._packer.pack(*command)]

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send a packed command, and connect first if necessary.

        redis.asyncio's own method uses asyncio.wait_for, which needs a task and, before Python 3.12, loses a
        cancellation that comes just after the bytes were written.
        """
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()
        try:
            async with asyncio.timeout(self.socket_timeout):
                await self._send_packed_command([command] if isinstance(command, bytes) else command)
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise redis.TimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:  # some of the bytes may be on their way
            await self.disconnect(nowait=True)
            raise


class PackedConnection(_Packed, redis.asyncio.Connection):
    """A TCP connection to Redis that uses a given packer of commands."""


class PackedTlsConnection(_Packed, redis.asyncio.SSLConnection):
    """A TLS connection to Redis that uses a given packer of commands."""


class PackedUnixConnection(_Packed, redis.asyncio.UnixDomainSocketConnection):
    """A connection to Redis's Unix socket that uses a given packer of commands."""


PACKED: dict[Any, Any] = {
    redis.asyncio.Connection: PackedConnection,
    redis.asyncio.SSLConnection: PackedTlsConnection,
    redis.asyncio.UnixDomainSocketConnection: PackedUnixConnection,
}


class AsyncFoundConnection(PackedConnection):
    """A connection that looks up its server whenever it connects. The lookup runs in a separate thread."""

    def __init__(self, *, lookup: Lookup, **settings: Any) -> None:
        self._lookup = lookup
        super().__init__(**settings)

    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._lookup.find)
        try:
            await super()._connect()
        except OSError:  # also a timeout
            self._lookup.mark_address_stale()
            raise


class AsyncOwnerConnection(AsyncFoundConnection):
    """Asyncio version of OwnerConnection, a connection to the cluster node that owns a slot."""

    _lookup: OwnerLookup

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in to a cluster node, and check that the node owns the slot."""
        await super().on_connect_check_health(check_health=check_health)
        await self.send_command("EXISTS", key_prefix(self._lookup.tag), check_health=False)
        await self.read_response()

    async def read_response(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return await super().read_response(*arguments, **settings)
        except ELSEWHERE as error:
            await self.disconnect(nowait=True)  # the rest of a pipeline was refused, too
            raise self._lookup.elsewhere(self, error) from error


class AsyncOwnerTlsConnection(AsyncOwnerConnection, redis.asyncio.SSLConnection):
    """TLS connection to the cluster node that owns a slot, for asyncio."""


class AsyncPrimaryConnection(AsyncFoundConnection):
    """Asyncio version of PrimaryConnection, a connection to the Sentinels' current primary."""

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the server is a primary."""
        await super().on_connect_check_health(check_health=check_health)
        await self.send_command("INFO", "replication", check_health=False)
        check_primary(self, self._lookup, await self.read_response())

    async def read_response(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return await super().read_response(*arguments, **settings)
        except redis.ReadOnlyError as error:
            await self.disconnect(nowait=True)  # the rest of a pipeline was refused, too
            raise demoted(self) from error


class AsyncPrimaryTlsConnection(AsyncPrimaryConnection, redis.asyncio.SSLConnection):
    """TLS connection to the Sentinels' current primary, for asyncio."""


def connect_async(url: str, *, tag: str, seconds: float, **settings: Any) -> redis.asyncio.Redis:
    """Return an asyncio client of the server that a URL names (see `connect`), for one event loop.

    `settings`: further settings of redis.asyncio.Redis, and `packer`, a packer of commands.
    """
    address = parse(url)
    settings |= {"socket_timeout": seconds, "socket_connect_timeout": seconds, "max_connections": MOST_CONNECTIONS}
    settings["driver_info"] = DRIVER
    kind: type[AsyncFoundConnection]
    if address.nodes or address.sentinels:
        lookup, given = lookup_of(address, tag)
        if address.nodes:
            kind = AsyncOwnerTlsConnection if address.tls else AsyncOwnerConnection
        else:
            kind = AsyncPrimaryTlsConnection if address.tls else AsyncPrimaryConnection
        pool = redis.asyncio.ConnectionPool(connection_class=kind, lookup=lookup, **(given | settings))
    else:
        pool = redis.asyncio.ConnectionPool.from_url(address.url, **settings)
        pool.connection_class = PACKED[pool.connection_class]  # which the URL has chosen
    client = redis.asyncio.Redis.from_pool(pool)
    marks[client] = WriteFence(mark_key(tag))
    return client


async def acknowledged_async(
    client: redis.asyncio.Redis, commands: Sequence[tuple[Any, ...]], *, replicas: int, seconds: float
) -> list[Any]:
    """Send commands in one round trip; return their replies once `replicas` replicas have all writes so far.

    Raises like `acknowledged`.
    """
    mark = marks[client]
    before = mark.last
    async with client.pipeline(transaction=False) as pipe:
        for command in (*commands, *mark.asking(replicas, seconds)):
            pipe.execute_command(*command)
        replies = await pipe.execute(raise_on_error=False)
    try:
        return mark.checked(replies, before, replicas, seconds)
    except TooFewReplicas:
        await client.connection_pool.disconnect(inuse_connections=False)
        mark_address_stale(client)
        raise


async def read_async(
    client: redis.asyncio.Redis, commands: Sequence[tuple[Any, ...]], *, atomic: bool = False
) -> list[Any]:
    """Send commands in one round trip and return their replies. Raises the first error among the replies."""
    async with client.pipeline(transaction=atomic) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return without_errors(await pipe.execute(raise_on_error=False))


async def keys_of_async(client: redis.asyncio.Redis, prefix: str) -> list[str]:
    """Return the keys of a server that begin with a prefix. Asyncio version of `keys_of`."""
    async with client.client() as one:
        scanned = one.scan_iter(match=f"{prefix}*", count=1000)
        found = [key if isinstance(key, str) else key.decode() async for key in scanned]
        await one.exists(prefix)
    return found
