"""Connections that go to whichever node of a Redis Cluster owns a slot when they are made.

All keys of one tag are in one slot (relaxd.redis_client.keys), so a client talks to one node, as to a single server.
When a node says that the slot is elsewhere, or on its way, the connection is given up; the next one asks again who owns
it. An ASK is not followed: scripts would find only those keys that have moved already.
"""

from collections.abc import Mapping
from typing import Any

import redis
from redis.exceptions import AskError, ClusterDownError, TryAgainError

from relaxd.redis_client.address import RedisAddress
from relaxd.redis_client.found import FoundConnection, ask
from relaxd.redis_client.keys import key_prefix, slot_of

Node = tuple[str, int]
ELSEWHERE = (AskError, ClusterDownError, TryAgainError, redis.ReadOnlyError)
"""Replies of a node that doesn't own a slot, or not all of its keys. MovedError is an AskError."""


class OwnerLookup:
    """Asks nodes for the owner of a tag's slot, beginning with the last one that knew."""

    def __init__(self, address: RedisAddress, tag: str, settings: Mapping[str, Any]) -> None:
        """`settings`: redis-py's, of users and TLS."""
        self.tag = tag
        self.slot = slot_of(tag)
        self._given = address.nodes
        self._nodes = address.nodes
        """Nodes named in the URL or by another node, in the order of queries."""
        self._settings = settings

    def find(self) -> Node:
        """Return host and port of the owner. Raises redis.ConnectionError: no node knows it."""
        problems = []
        for index, node in enumerate(self._nodes):
            place = f"{node[0]}:{node[1]}"
            try:
                ranges = ask(*node, self._settings, "CLUSTER", "SLOTS")
            except (redis.RedisError, OSError) as error:
                problems.append(f"{place}: {error}")
                continue
            owner = next((one[2] for one in ranges if one[0] <= self.slot <= one[1]), None)
            if owner is not None:
                named = {_address(server, node) for one in ranges for server in one[2:]}
                rotated = (*self._nodes[index:], *self._nodes[:index], *sorted(named))
                self._nodes = tuple(dict.fromkeys(one for one in rotated if one in named or one in self._given))
                return _address(owner, node)
            problems.append(f"{place} knows no owner")
        raise redis.ConnectionError(f"NOOWNER slot {self.slot} of {self.tag!r}: {'; '.join(problems)}")

    def doubt(self) -> None:
        """Ask another node first the next time: what this one said may be out of date."""
        self._nodes = (*self._nodes[1:], *self._nodes[:1])

    def elsewhere(self, connection: Any, error: redis.RedisError) -> redis.ConnectionError:
        """Return the error for a node that said that the slot, or one of its keys, isn't there; doubts it."""
        self.doubt()
        node, what = f"{connection.host}:{connection.port}", f"slot {self.slot} of {self.tag!r}"
        return redis.ConnectionError(f"{error.status_code} {node} says of {what}: {error}")


class OwnerConnection(FoundConnection):
    """A connection to the node that owns a slot."""

    _lookup: OwnerLookup

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the node owns the slot: commands without keys would be carried out anywhere."""
        super().on_connect_check_health(check_health=check_health)
        self.send_command("EXISTS", key_prefix(self._lookup.tag), check_health=False)
        self.read_response()

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """Read a reply; see redis.Connection."""
        try:
            return super().read_response(*arguments, **settings)
        except ELSEWHERE as error:
            self.disconnect()  # what is still to be read of a pipeline was refused, too
            raise self._lookup.elsewhere(self, error) from error


class OwnerTlsConnection(OwnerConnection, redis.SSLConnection):
    """The same with TLS."""


def _address(server: list[Any], asked: Node) -> Node:
    """Return the address of a server in CLUSTER SLOTS. Without a host it is on the queried node's host."""
    return str(server[0] or asked[0]), int(server[1])
