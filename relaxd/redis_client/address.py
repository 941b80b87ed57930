"""The URL of a Redis: of one server, or of the Sentinels that know which server is the primary now.

    redis://host:port/db                                  rediss:// with TLS; unix:///path
    redis+sentinel://host:port,host:port/service/db       rediss+sentinel:// with TLS to Sentinels and servers

Either may have `?wait_replicas=N`: a write counts only once N replicas have it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

SCHEMES = ("redis", "rediss", "unix")
SENTINEL = "+sentinel"
SENTINEL_PORT = 26379
HOST = re.compile(r"([^\s:\[\],]+)(?::(\d{1,5}))?")
FORMS = "redis://host:port/db, rediss:// (TLS), unix:///path or redis+sentinel://host:port,host:port/service/db"
MAX_REPLICAS = 16


@dataclass(frozen=True)
class RedisAddress:
    """A parsed URL."""

    url: str
    """For redis-py. With Sentinels its host means nothing."""
    sentinels: tuple[tuple[str, int], ...]
    """Hosts and ports; none: the URL is of one server."""
    service: str
    """What the Sentinels call the primary and its replicas."""
    wait_replicas: int
    """Replicas that must have a write before it counts."""
    sentinel_user: str
    sentinel_password_file: str
    """Name, and file with the password, for the Sentinels themselves; empty: they ask for none."""

    @property
    def tls(self) -> bool:
        """Whether connections use TLS."""
        return self.url.startswith("rediss://")


def parse(url: str) -> RedisAddress:
    """Parse a URL. Raises ValueError, which says what is wrong and shows no password."""
    parts = urlsplit(url)
    scheme = parts.scheme.removesuffix(SENTINEL)
    if "cluster" in parts.scheme:
        raise ValueError(
            f"{parts.scheme}:// is a Redis Cluster, which isn't supported: name one server, or Sentinels ({FORMS})"
        )
    if scheme not in SCHEMES or (scheme == "unix" and scheme != parts.scheme):
        raise ValueError(f"{parts.scheme or 'nothing'}:// is no scheme of a Redis: it must be {FORMS}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    sentinel = parts.scheme.endswith(SENTINEL)
    # With Sentinels, whoever wants to lose nothing gets it without asking; without them there may be no replica.
    wait_replicas = options.pop("wait_replicas", "1" if sentinel else "0")
    if not wait_replicas.isdigit() or int(wait_replicas) > MAX_REPLICAS:
        raise ValueError(f"wait_replicas={wait_replicas}: it must be a number of replicas, 0 to {MAX_REPLICAS}")
    user, password_file = options.pop("sentinel_user", ""), options.pop("sentinel_password_file", "")
    if not sentinel:
        if user or password_file:
            raise ValueError("sentinel_user and sentinel_password_file are for redis+sentinel:// URLs")
        return RedisAddress(_with_options(url.partition("?")[0], options), (), "", int(wait_replicas), "", "")
    credentials, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service or (database and not database.isdigit()):
        raise ValueError(
            f"{parts.path or '/'} must name the service that the Sentinels watch, and may name a database: "
            "redis+sentinel://host:port,host:port/service/db"
        )
    plain = _with_options(f"{scheme}://{credentials}{at}sentinel/{database}", options)
    return RedisAddress(plain, _hosts(hosts), service, int(wait_replicas), user, password_file)


def where(url: str) -> str:
    """Return where a valid URL leads, for people: without user, password and parameters."""
    address = parse(url)
    if address.sentinels:
        return f"the primary of {address.service!r} (Sentinels {_join(address.sentinels)})"
    parts = urlsplit(address.url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def with_access_of(url: str, other: str) -> str:
    """Return a URL with the user, the password and the certificates of another one, for what it doesn't have itself."""
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


def _hosts(text: str) -> tuple[tuple[str, int], ...]:
    found = [HOST.fullmatch(part) for part in text.split(",")]
    bad = [part for part, match in zip(text.split(","), found, strict=True) if match is None]
    if bad:
        raise ValueError(f"{bad[0]!r} is no Sentinel: it must be host:port (an IPv6 address needs a name)")
    hosts = tuple((match[1], int(match[2] or SENTINEL_PORT)) for match in found if match is not None)
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"the Sentinels {_join(hosts)}: one is named twice")
    return hosts


def _join(hosts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{host}:{port}" for host, port in hosts)
