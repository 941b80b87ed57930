"""The URL of a Redis: of one server, of Sentinels that know which server is the primary now, or of nodes of a cluster.

    redis://host:port/db                                  rediss:// with TLS; unix:///path
    redis+sentinel://host:port,host:port/service/db       rediss+sentinel:// with TLS to Sentinels and servers
    redis+cluster://host:port,host:port                   rediss+cluster:// with TLS; some nodes, which name the others

Each may have `?wait_replicas=N`: a write counts only once N replicas have it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

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
    """A parsed URL."""

    url: str
    """URL for redis-py. Its host is meaningless with Sentinels and in a cluster."""
    sentinels: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of the Sentinels; empty if the URL names none."""
    nodes: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of some nodes of a cluster; empty without a cluster."""
    service: str = ""
    """The Sentinels' name for the primary and its replicas."""
    wait_replicas: int = 0
    """Number of replicas that must have a write before it counts."""
    sentinel_user: str = ""
    sentinel_password_file: str = ""
    """User, and password file, for the Sentinels themselves; empty if they require none."""

    @property
    def tls(self) -> bool:
        """True if connections use TLS."""
        return self.url.startswith("rediss://")


def parse(url: str) -> RedisAddress:
    """Parse a URL. Raises ValueError with the fault, but without any password."""
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
    """Return the server of a valid URL in readable form, without user, password and parameters."""
    address = parse(url)
    if address.sentinels:
        return f"the primary of {address.service!r} (Sentinels {_join(address.sentinels)})"
    if address.nodes:
        return f"the cluster of {_join(address.nodes)}"
    parts = urlsplit(address.url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def with_access_of(url: str, other: str) -> str:
    """Return a URL completed with the user, the password and the certificates of another one."""
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
