"""Connections that go to whichever server is the primary when they are made.

As https://redis.io/docs/latest/develop/reference/sentinel-clients describes: ask one Sentinel after the other, connect,
check that the server is a primary. A server that says READONLY was demoted, and its connection is given up.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from relaxd.redis_client.address import RedisAddress
from relaxd.redis_client.found import FoundConnection, Lookup, ask


class PrimaryLookup:
    """Asks Sentinels for the primary, beginning with the last one that knew."""

    def __init__(self, address: RedisAddress, tls: Mapping[str, Any]) -> None:
        """`tls`: redis-py's settings of TLS, for the Sentinels, too."""
        self._service = address.service
        self._sentinels: Sequence[tuple[str, int]] = address.sentinels
        self._settings = {**tls, "username": address.sentinel_user or None}
        self._password_file = address.sentinel_password_file

    def find(self) -> tuple[str, int]:
        """Return host and port of the primary. Raises redis.ConnectionError: no Sentinel knows it."""
        problems = []
        for index, (host, port) in enumerate(self._sentinels):
            try:
                found = self._ask(host, port)
            except (redis.RedisError, OSError) as error:
                problems.append(f"{host}:{port}: {error}")
                continue
            if found:
                self._sentinels = (*self._sentinels[index:], *self._sentinels[:index])
                return found[0], int(found[1])
            problems.append(f"{host}:{port} watches no {self._service!r}")
        raise redis.ConnectionError(f"NOPRIMARY no Sentinel names one: {'; '.join(problems)}")

    def doubt(self) -> None:
        """Ask another Sentinel first the next time: what this one said may be out of date."""
        self._sentinels = (*self._sentinels[1:], *self._sentinels[:1])

    def _ask(self, host: str, port: int) -> list[str] | None:
        password = Path(self._password_file).read_text(encoding="utf-8").strip() if self._password_file else None
        settings = {**self._settings, "password": password}
        found: list[str] | None = ask(host, port, settings, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        return found


def check_primary(connection: Any, lookup: Lookup, replication: bytes | str) -> None:
    """Raise redis.ConnectionError, and doubt who named it, if a server's facts say that it is not a primary."""
    if "role:master" not in (replication.decode() if isinstance(replication, bytes) else replication):
        lookup.doubt()
        node = f"{connection.host}:{connection.port}"
        raise redis.ConnectionError(f"READONLY {node}, which the Sentinels named a moment ago")


def demoted(connection: Any) -> redis.ConnectionError:
    """Return the error for a server that says READONLY."""
    node = f"{connection.host}:{connection.port}"
    return redis.ConnectionError(f"READONLY {node} was demoted: the Sentinels are asked for the next primary")


class PrimaryConnection(FoundConnection):
    """A connection to the primary."""

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the server is a primary."""
        super().on_connect_check_health(check_health=check_health)
        self.send_command("INFO", "replication", check_health=False)
        check_primary(self, self._lookup, self.read_response())

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """Read a reply; see redis.Connection."""
        try:
            return super().read_response(*arguments, **settings)
        except redis.ReadOnlyError as error:
            self.disconnect()  # what is still to be read of a pipeline was refused, too
            raise demoted(self) from error


class PrimaryTlsConnection(PrimaryConnection, redis.SSLConnection):
    """The same with TLS."""
