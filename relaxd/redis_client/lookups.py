"""The URL of a Redis, and connections that look up their server whenever they connect: the primary, or the owner of a
slot in a Redis Cluster.

A URL names one server, Sentinels that know which server is the primary now, or nodes of a cluster:

    redis://host:port/db            rediss:// with TLS; unix:///path
    redis+sentinel://host:port,host:port/service/db    rediss+sentinel:// with TLS to Sentinels and servers
    redis+cluster://host:port,host:port    rediss+cluster:// with TLS; some nodes, which name the others

Each may have `?wait_replicas=N`: a write counts only once N replicas have it.

A primary is found as https://redis.io/docs/latest/develop/reference/sentinel-clients describes: ask one Sentinel after
the other, connect, check that the server is a primary. A server that says READONLY was demoted, and its connection is
closed.

In a cluster, all keys of one tag are in one slot, so a client talks to one node, as to a single server. When a node
says that the slot is elsewhere or is being moved, the connection is closed; the next connection asks again which node
owns it. An ASK is not followed: scripts would find only the keys that have moved already.

A run's tag is its id; the coordinator's records have the tag COORDINATOR. Scripts may compute keys of their tag while
they run, because one node has all of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, TryAgainError
from redis.retry import Retry

SCHEMES = ("redis", "rediss", "unix")
SENTINEL, CLUSTER = "+sentinel", "+cluster"
SENTINEL_PORT, NODE_PORT = 26379, 6379
HOST = re.compile(r"([^\s:\[\],]+)(?::(\d{1,5}))?")
FORMS = (
    "redis://host:port/db, rediss:// (TLS), unix:///path, redis+sentinel://host:port,host:port/service/db or "
    "redis+cluster://host:port,host:port"
)
MAX_REPLICAS = 16


@dataclass(frozen=True)
class RedisAddress:
    """The parts of a parsed Redis URL."""

    url: str
    """URL for redis-py. With Sentinels and in a cluster, the URL's host is meaningless."""
    sentinels: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of the Sentinels; empty if the URL names none."""
    nodes: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of the cluster nodes in the URL; empty if the URL names no cluster."""
    service: str = ""
    """Service name by which the Sentinels know the primary and its replicas."""
    wait_replicas: int = 0
    """Number of Redis's replicas that must have a write before it counts."""
    sentinel_user: str = ""
    sentinel_password_file: str = ""
    """User, and file with the password, for logins to the Sentinels themselves; empty if they require none."""

    @property
    def tls(self) -> bool:
        """True if connections to Redis use TLS."""
        return self.url.startswith("rediss://")


def parse(url: str) -> RedisAddress:
    """Parse a Redis URL. Raises ValueError with the fault, but without any password."""
    parts = urlsplit(url)
    scheme, plus, kind = parts.scheme.partition("+")
    kind = plus + kind
    if scheme not in SCHEMES or kind not in ("", SENTINEL, CLUSTER) or (scheme == "unix" and kind):
        raise ValueError(f"{parts.scheme or 'nothing'}:// is no scheme of a Redis: it must be {FORMS}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    # By default no write is lost where servers usually have replicas: behind Sentinels and in clusters.
    wait_replicas = options.pop("wait_replicas", "1" if kind else "0")
    if not wait_replicas.isdigit() or int(wait_replicas) > MAX_REPLICAS:
        raise ValueError(f"wait_replicas={wait_replicas}: it must be a number of replicas, 0 to {MAX_REPLICAS}")
    user, password_file = options.pop("sentinel_user", ""), options.pop("sentinel_password_file", "")
    if kind != SENTINEL and (user or password_file):
        raise ValueError("sentinel_user and sentinel_password_file are for redis+sentinel:// URLs")
    if not kind:
        return RedisAddress(_with_options(url.partition("?")[0], options), wait_replicas=int(wait_replicas))
    credentials, at, hosts = parts.netloc.rpartition("@")
    if kind == CLUSTER:
        if parts.path not in ("", "/", "/0"):
            raise ValueError(f"{parts.path} must be /0 or nothing: a cluster has one database")
        plain = _with_options(f"{scheme}://{credentials}{at}cluster/0", options)
        nodes = _hosts(hosts, "a node of a cluster", NODE_PORT)
        return RedisAddress(plain, nodes=nodes, wait_replicas=int(wait_replicas))
    service, _, database = parts.path.strip("/").partition("/")
    if not service or (database and not database.isdigit()):
        raise ValueError(
            f"{parts.path or '/'} must name the service that the Sentinels watch, and may name a database: "
            "redis+sentinel://host:port,host:port/service/db"
        )
    plain = _with_options(f"{scheme}://{credentials}{at}sentinel/{database}", options)
    return RedisAddress(
        plain,
        sentinels=_hosts(hosts, "a Sentinel", SENTINEL_PORT),
        service=service,
        wait_replicas=int(wait_replicas),
        sentinel_user=user,
        sentinel_password_file=password_file,
    )


def where(url: str) -> str:
    """Describe the server of a valid Redis URL for messages, without user, password and parameters."""
    address = parse(url)
    if address.sentinels:
        return f"the primary of {address.service!r} (Sentinels {_join(address.sentinels)})"
    if address.nodes:
        return f"the cluster of {_join(address.nodes)}"
    parts = urlsplit(address.url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def with_access_of(url: str, other: str) -> str:
    """Return a Redis URL to which the user, the password and the certificates of another URL are added."""
    parts, lender = urlsplit(url), urlsplit(other)
    credentials, at, _ = lender.netloc.rpartition("@")
    if "@" not in parts.netloc and parts.scheme != "unix":
        parts = parts._replace(netloc=f"{credentials}{at}{parts.netloc}")
    if parts.scheme.startswith("rediss"):
        lent = {name: value for name, value in parse_qsl(lender.query) if name.startswith("ssl_")}
        parts = parts._replace(query=urlencode(lent | dict(parse_qsl(parts.query)), safe="/"))
    return parts.geturl() if parts.scheme != "unix" else url


def _with_options(url: str, options: Mapping[str, str]) -> str:
    return f"{url}?{urlencode(options, safe='/')}" if options else url


def _hosts(text: str, what: str, default_port: int) -> tuple[tuple[str, int], ...]:
    found = [HOST.fullmatch(part) for part in text.split(",")]
    bad = [part for part, match in zip(text.split(","), found, strict=True) if match is None]
    if bad:
        raise ValueError(f"{bad[0]!r} is not {what}: it must be host:port (an IPv6 address needs a name)")
    hosts = tuple((match[1], int(match[2] or default_port)) for match in found if match is not None)
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"{_join(hosts)}: one is named twice")
    return hosts


def _join(hosts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{host}:{port}" for host, port in hosts)


ASK_SECONDS = 1.0
"""Deadline of a lookup's query to one server, in seconds. After it, the lookup tries the next server."""


class Lookup(Protocol):
    """Finds the address of the server to connect to, by asking Sentinels or cluster nodes."""

    def find(self) -> tuple[str, int]:
        """Return host and port of the server to connect to. Raises redis.ConnectionError if no queried server knows
        them."""
        ...

    def mark_address_stale(self) -> None:
        """Begin the next lookup at another Sentinel or node, because the last answer may be outdated."""
        ...


class FoundConnection(redis.Connection):
    """A Redis connection that looks up its server whenever it connects."""

    def __init__(self, *, lookup: Lookup, **settings: Any) -> None:
        self._lookup = lookup
        super().__init__(**settings)

    def _connect(self) -> Any:
        self.host, self.port = self._lookup.find()
        try:
            return super()._connect()
        except OSError:
            self._lookup.mark_address_stale()  # the server that named it may not know its successor
            raise


def ask(host: str, port: int, settings: Mapping[str, Any], *words: str) -> Any:
    """Send one command to a server, and return the reply. Raises redis.RedisError, OSError."""
    seconds: dict[str, Any] = {"socket_timeout": ASK_SECONDS, "socket_connect_timeout": ASK_SECONDS}
    once = Retry(NoBackoff(), 0)  # by default redis-py would ask the same server again for seconds
    with redis.Redis(host, port, protocol=2, decode_responses=True, retry=once, **seconds, **settings) as client:
        return client.execute_command(*words)


class PrimaryLookup:
    """Asks Sentinels for the primary, beginning with the last Sentinel that knew it."""

    def __init__(self, address: RedisAddress, tls: Mapping[str, Any]) -> None:
        """Create a lookup at the Sentinels of a Redis URL. `tls`: redis-py's TLS settings, used for the Sentinels,
        too."""
        self._service = address.service
        self._sentinels: Sequence[tuple[str, int]] = address.sentinels
        self._settings = {**tls, "username": address.sentinel_user or None}
        self._password_file = address.sentinel_password_file

    def find(self) -> tuple[str, int]:
        """Return host and port of the primary. Raises redis.ConnectionError if no Sentinel knows it."""
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

    def mark_address_stale(self) -> None:
        """Begin the next lookup at another Sentinel, because the last answer may be outdated."""
        self._sentinels = (*self._sentinels[1:], *self._sentinels[:1])

    def _ask(self, host: str, port: int) -> list[str] | None:
        password = Path(self._password_file).read_text(encoding="utf-8").strip() if self._password_file else None
        settings = {**self._settings, "password": password}
        found: list[str] | None = ask(host, port, settings, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        return found


def check_primary(connection: Any, lookup: Lookup, replication: bytes | str) -> None:
    """Raise redis.ConnectionError, and mark the address stale, if a server's INFO shows that it is no primary."""
    if "role:master" not in (replication.decode() if isinstance(replication, bytes) else replication):
        lookup.mark_address_stale()
        node = f"{connection.host}:{connection.port}"
        raise redis.ConnectionError(f"READONLY {node}, which the Sentinels named a moment ago")


def demoted(connection: Any) -> redis.ConnectionError:
    """Return the error for a server that answers READONLY because it is no longer the primary."""
    node = f"{connection.host}:{connection.port}"
    return redis.ConnectionError(f"READONLY {node} was demoted: the Sentinels are asked for the next primary")


class PrimaryConnection(FoundConnection):
    """A connection to the Redis server that the Sentinels name as the primary."""

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the server is a primary."""
        super().on_connect_check_health(check_health=check_health)
        self.send_command("INFO", "replication", check_health=False)
        check_primary(self, self._lookup, self.read_response())

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return super().read_response(*arguments, **settings)
        except redis.ReadOnlyError as error:
            self.disconnect()  # the rest of a pipeline was refused, too
            raise demoted(self) from error


class PrimaryTlsConnection(PrimaryConnection, redis.SSLConnection):
    """TLS connection to the Redis server that the Sentinels name as the primary."""


COORDINATOR = "coordinator"
"""Tag of the coordinator's keys. No run may have this id."""


def key_prefix(tag: str) -> str:
    """Return the prefix of a tag's keys. Redis Cluster hashes the part in braces."""
    return f"relaxd:{{{tag}}}:"


def mark_key(tag: str) -> str:
    """Return the key of a tag's mark, the counter of acknowledged writes. Its prefix differs from that of the tag's
    other keys, because the mark outlives a run."""
    return f"relaxd:acknowledged:{{{tag}}}"


def slot_of(tag: str) -> int:
    """Return the slot of a tag's keys in a Redis Cluster."""
    return int(key_slot(key_prefix(tag).encode()))


Node = tuple[str, int]
ELSEWHERE = (AskError, ClusterDownError, TryAgainError, redis.ReadOnlyError)
"""Errors that a cluster node answers if it doesn't own a slot, or lacks some of the slot's keys. MovedError is an
AskError."""


class OwnerLookup:
    """Asks cluster nodes which node owns a tag's slot, beginning with the last node that knew."""

    def __init__(self, address: RedisAddress, tag: str, settings: Mapping[str, Any]) -> None:
        """Create a lookup for a tag's slot in a cluster. `settings`: redis-py's settings of user, password and TLS."""
        self.tag = tag
        self.slot = slot_of(tag)
        self._given = address.nodes
        self._nodes = address.nodes
        """Cluster nodes that the URL or another node named, in the order of queries."""
        self._settings = settings

    def find(self) -> Node:
        """Return host and port of the node that owns the slot. Raises redis.ConnectionError if no node knows it."""
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

    def mark_address_stale(self) -> None:
        """Begin the next lookup at another node, because the last answer may be outdated."""
        self._nodes = (*self._nodes[1:], *self._nodes[:1])

    def elsewhere(self, connection: Any, error: redis.RedisError) -> redis.ConnectionError:
        """Return the error for a cluster node that lacks the slot or one of its keys, and mark the node's address
        stale."""
        self.mark_address_stale()
        node, what = f"{connection.host}:{connection.port}", f"slot {self.slot} of {self.tag!r}"
        return redis.ConnectionError(f"{error.status_code} {node} says of {what}: {error}")


class OwnerConnection(FoundConnection):
    """A connection to the cluster node that owns a slot."""

    _lookup: OwnerLookup

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and check that the node owns the slot, because any node would execute commands without keys."""
        super().on_connect_check_health(check_health=check_health)
        self.send_command("EXISTS", key_prefix(self._lookup.tag), check_health=False)
        self.read_response()

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return super().read_response(*arguments, **settings)
        except ELSEWHERE as error:
            self.disconnect()  # the rest of a pipeline was refused, too
            raise self._lookup.elsewhere(self, error) from error


class OwnerTlsConnection(OwnerConnection, redis.SSLConnection):
    """TLS connection to the cluster node that owns a slot."""


def _address(server: list[Any], asked: Node) -> Node:
    """Return host and port of a server in the reply to CLUSTER SLOTS. A server without a host is on the queried node's
    host."""
    return str(server[0] or asked[0]), int(server[1])
