"""The board's way to Redis: deadlines, scripts that are loaded once, retries with back-off, errors by name."""

import logging
import time
from collections.abc import Callable
from functools import cache
from hashlib import sha1
from importlib import resources
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError
from redis.retry import Retry

from relaxd.board.admission import explain_limit
from relaxd.board.errors import BoardError, BoardUnavailable, Fenced, GateClosed, RunExists, RunMissing, StepConflict
from relaxd.board.packer import CommandPacker

logger = logging.getLogger(__name__)
T = TypeVar("T")

ERRORS: dict[str, type[BoardError]] = {
    "FENCED": Fenced,
    "STEPCONFLICT": StepConflict,
    "RUNMISSING": RunMissing,
    "RUNEXISTS": RunExists,
    "NOGROUP": RunMissing,
    "CONFLICT": BoardError,
}
GROWING = {"publish", "create"}
"""Scripts that a full Redis refuses. The others it must run: they are what makes room."""
SHARED = dict.fromkeys(("publish", "room", "relieve", "memory"), ("admission",))
"""Files that a script needs besides common.lua. They are no scripts of their own."""
PASSING = {
    "OOM": "is full (maxmemory)",
    "READONLY": "is a replica now, not the primary",
    "NOREPLICAS": "has too few replicas to take writes (min-replicas-to-write)",
    "MISCONF": "can't write to its disk",
    "LOADING": "is loading its data",
    "BUSY": "is busy with a script",
    "MASTERDOWN": "has lost its primary",
    "CLUSTERDOWN": "is a cluster that is down",
    "TRYAGAIN": "is moving keys to another node",
    "UNBLOCKED": "is becoming a replica",
}
"""Errors that pass without anybody's doing anything to this process, by their first word: what Redis is then."""
FIRST_PAUSE_SECONDS = 0.02
MAX_PAUSE_SECONDS = 1.0


@cache
def script_text(name: str) -> str:
    """The text of a script: what all share, then its own."""
    folder = resources.files("relaxd.board") / "lua"
    flags = "" if name in GROWING else " flags=allow-oom"
    files = ("common", *SHARED.get(name, ()), name)
    return f"#!lua{flags}\n" + "".join((folder / f"{file}.lua").read_text() for file in files)


@cache
def script_names() -> tuple[str, ...]:
    """The names of all scripts."""
    files = {path.name.removesuffix(".lua") for path in (resources.files("relaxd.board") / "lua").iterdir()}
    return tuple(sorted(files - {"common", *(name for shared in SHARED.values() for name in shared)}))


@cache
def script_hash(name: str) -> str:
    """The name under which Redis knows a script once it is loaded."""
    return sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


def passing(error: redis.RedisError) -> str:
    """Say why Redis can't be used just now, as the end of a sentence; "" when waiting would not help."""
    if isinstance(error, redis.AuthenticationError):
        return f"refuses the password: {error}"
    # redis-py cuts the first word off where it has a class for it.
    word = error.status_code or str(error).split(" ", 1)[0]
    if word in PASSING:
        return f"{PASSING[word]}: {error}"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"doesn't answer: {error}"
    return ""


class RedisConnection:
    """A thread-safe connection pool that runs operations and repeats them while Redis is away.

    Every operation must be idempotent: when a reply is lost, it runs again. `timeout_seconds` limits connecting and
    each wait for bytes; `retry_seconds` limits the whole, after which BoardUnavailable is raised.
    """

    def __init__(self, url: str, *, timeout_seconds: float, retry_seconds: float) -> None:
        self.url = url
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        self.client: redis.Redis = redis.Redis.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            command_packer=CommandPacker(),
        )

    def run(self, operation: Callable[[Any], T]) -> T:
        """Do an operation; again, with back-off, while Redis can't be reached or can't do it just now (see PASSING).

        It gets the redis.Redis (as Any: redis-py's types do not know that this one answers bytes).
        """
        deadline = time.monotonic() + self.retry_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return operation(self.client)
            except NoScriptError:
                self._load_scripts()
            except redis.RedisError as error:
                if not (why := passing(error)):
                    if isinstance(error, ResponseError):
                        raise _translate(error) from error
                    raise
                if time.monotonic() + pause > deadline:
                    raise BoardUnavailable(f"Redis at {self._address()} {why}") from error
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def script(self, name: str, prefix: str, *arguments: Any) -> Any:
        """Run one script."""
        return self.run(lambda client: client.evalsha(script_hash(name), 1, prefix, *arguments))

    def pipeline(self, commands: Callable[[redis.client.Pipeline], None], *, atomic: bool = False) -> list[Any]:
        """Run commands in one round trip and return their replies; the first error is raised."""

        def operation(client: redis.Redis) -> list[Any]:
            with client.pipeline(transaction=atomic) as pipe:
                commands(pipe)
                replies = pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies

        return self.run(operation)

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    def _load_scripts(self) -> None:
        """Give Redis the scripts: it forgets them when it restarts."""
        try:
            for name in script_names():
                self.client.script_load(script_text(name))
        except redis.RedisError as error:
            if not passing(error):
                raise
            logger.debug("Redis went away while scripts were loaded: %s", error)  # the operation itself comes back here

    def _address(self) -> str:
        """Where Redis is, without the password."""
        settings = self.client.connection_pool.connection_kwargs
        return str(settings.get("path") or f"{settings.get('host')}:{settings.get('port')}")


def _translate(error: ResponseError) -> BoardError:
    """The error that a script meant: its first word is the kind."""
    kind, _, detail = str(error).partition(" ")
    if kind == "GATE":
        return GateClosed(*explain_limit(detail))
    if kind in ERRORS:
        return ERRORS[kind](detail)
    return BoardError(str(error))
