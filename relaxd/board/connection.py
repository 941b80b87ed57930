"""The board's Redis client: deadlines, cached scripts, retries with back-off, typed errors."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha1
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError
from redis.retry import Retry

from relaxd.board.errors import (
    BoardError,
    BoardUnavailable,
    Fenced,
    GateClosed,
    RunExists,
    RunMissing,
    StepConflict,
    TooLate,
)
from relaxd.board.gate_reasons import explain_limit
from relaxd.board.resp import CommandPacker
from relaxd.redis_client import acknowledged, connect, misnamed, parse, passing, where
from relaxd.retry import Backoff

logger = logging.getLogger(__name__)
T = TypeVar("T")

ERRORS: dict[str, type[BoardError]] = {
    "FENCED": Fenced,
    "STEPCONFLICT": StepConflict,
    "RUNMISSING": RunMissing,
    "RUNEXISTS": RunExists,
    "NOGROUP": RunMissing,
    "CONFLICT": BoardError,
    "TOOLATE": TooLate,
}
GROWING = {"publish", "create"}
"""Scripts that a full Redis refuses. It must run the others, which free memory."""
LIBRARY, SIDES = "library", ("coordinator", "stage", "trainer")
"""Folders of lua: what scripts include, and the scripts of each side of the board."""
SHARED = dict.fromkeys(("publish", "room", "relieve", "memory"), ("admission",))
"""Files of lua/library that a script includes besides common.lua."""
BACKOFF = Backoff(first_seconds=0.02, max_seconds=1.0)


@cache
def script_text(name: str) -> str:
    """Return the source of a script, libraries included."""
    flags = "" if name in GROWING else " flags=allow-oom"
    library = _files(LIBRARY)
    files = [*(library[one] for one in ("common", *SHARED.get(name, ()))), _scripts()[name]]
    return f"#!lua{flags}\n" + "".join(file.read_text() for file in files)


@cache
def script_names() -> tuple[str, ...]:
    """Return the names of all scripts."""
    return tuple(sorted(_scripts()))


@cache
def _scripts() -> dict[str, Traversable]:
    """Return the file of each script, by name; which side of the board it belongs to, its folder says."""
    return {name: file for side in SIDES for name, file in _files(side).items()}


def _files(folder: str) -> dict[str, Traversable]:
    files = (resources.files("relaxd.board") / "lua" / folder).iterdir()
    return {file.name.removesuffix(".lua"): file for file in files}


@cache
def script_hash(name: str) -> str:
    """Return the SHA-1 by which EVALSHA calls a loaded script."""
    return sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


class RedisConnection:
    """A thread-safe connection pool that retries operations while Redis is unavailable.

    Operations must be idempotent: one whose reply was lost, or that too few replicas have, runs again.
    `timeout_seconds` limits connecting and each read; `retry_seconds` limits all attempts together, after which
    BoardUnavailable is raised. What `script` and `write` did survives the primary, if the URL has `wait_replicas`.
    """

    def __init__(self, url: str, *, tag: str, timeout_seconds: float, retry_seconds: float) -> None:
        """`tag`: the run, whose keys are in one slot of a cluster."""
        self.url = url
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        self._replicas = parse(url).wait_replicas
        self.client: redis.Redis = connect(
            url,
            tag=tag,
            protocol=2,
            decode_responses=False,
            seconds=timeout_seconds,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            command_packer=CommandPacker(),
        )
        # Its entries come as scripts return them. redis-py would make a dictionary of each.
        del self.client.response_callbacks["XREADGROUP"]

    def run(self, operation: Callable[[Any], T]) -> T:
        """Run an operation, retrying it with back-off on connection and transient errors (see PASSING).

        The operation gets the redis.Redis, typed Any because redis-py's types do not know that replies are bytes.
        """
        deadline = time.monotonic() + self.retry_seconds
        failures = 0
        while True:
            try:
                return operation(self.client)
            except NoScriptError:
                self._load_scripts()
            except redis.RedisError as error:
                if not (why := passing(error)):
                    if why := misnamed(error):
                        raise BoardError(f"Redis at {where(self.url)} {why}") from error
                    if isinstance(error, ResponseError):
                        raise _translate(error) from error
                    raise
                failures += 1
                pause = BACKOFF.pause(failures)
                if time.monotonic() + pause > deadline:
                    raise BoardUnavailable(f"Redis at {where(self.url)} {why}") from error
                time.sleep(pause)  # brief: at most retry_seconds in all

    @staticmethod
    def call(name: str, prefix: str, *arguments: Any) -> tuple[Any, ...]:
        """Return the command that runs a script."""
        return ("EVALSHA", script_hash(name), 1, prefix, *arguments)

    def script(self, name: str, prefix: str, *arguments: Any, before: Sequence[tuple[Any, ...]] = ()) -> Any:
        """Run one script, in one round trip with the commands that are to run before it. Returns the script's reply."""
        commands = (*before, self.call(name, prefix, *arguments))

        def queue(pipe: redis.client.Pipeline) -> None:
            for command in commands:
                pipe.execute_command(*command)

        return self.write(queue)[-1]

    def write(self, commands: Callable[[redis.client.Pipeline], object]) -> list[Any]:
        """Send commands in one round trip and return their replies, once replicas have what they wrote."""
        seconds = self.timeout_seconds / 2  # so that its reply comes before a read gives up
        return self.run(lambda client: acknowledged(client, commands, replicas=self._replicas, seconds=seconds))

    def pipeline(self, commands: Callable[[redis.client.Pipeline], None], *, atomic: bool = False) -> list[Any]:
        """Send commands in one round trip and return their replies. Raises the first error among them."""

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
        """Load all scripts into Redis, which forgets them when it restarts."""
        try:
            for name in script_names():
                self.client.script_load(script_text(name))
        except redis.RedisError as error:
            if not passing(error):
                raise
            logger.debug(
                "Redis became unavailable while scripts were loaded: %s", error
            )  # `run` retries and loads again


def _translate(error: ResponseError) -> BoardError:
    """Map a script's error reply, whose first word is the kind, to an exception."""
    kind, _, detail = str(error).partition(" ")
    if kind == "GATE":
        return GateClosed(*explain_limit(detail))
    if kind in ERRORS:
        return ERRORS[kind](detail)
    return BoardError(str(error))
