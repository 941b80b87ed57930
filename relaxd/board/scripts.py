"""The board's scripts: their source, the hashes used to call them, and the meaning of their errors and replies."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha1
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from redis.exceptions import RedisError, ResponseError

from relaxd.board.types import (
    BoardError,
    Fenced,
    GateClosed,
    RunExists,
    RunMissing,
    StepConflict,
    TooLate,
)
from relaxd.redis_client import passing
from relaxd.redis_client.operations import Command, RedisOperation, Send
from relaxd.text import byte_amount

logger = logging.getLogger(__name__)


def explain_limit(answer: str) -> tuple[str, str]:
    """Split the gate's reply, a limit's word and numbers, into the word and a sentence that explains the limit."""
    word, *texts = answer.split()
    numbers = [int(float(text)) for text in texts]
    return word, _SENTENCES[word](*numbers)


def _closed() -> str:
    return "the coordinator keeps the gate closed"


def _weights() -> str:
    return "no engine has weights yet"


def _staleness(limit: int, version: int) -> str:
    return f"all {limit} groups that engines at weight version {version} may answer are published"


def _complete(needed: int) -> str:
    return f"all {needed} groups that the run needs are published"


def _memory(stored: int, reserved: int, each: int, high_water: int) -> str:
    return (
        f"open groups have stored {byte_amount(stored)} in Redis and may need {byte_amount(reserved)} more; another "
        f"group of up to {byte_amount(each)} would exceed the high-water mark of {byte_amount(high_water)} "
        "(board.high_water_bytes; unless set, four fifths of the maxmemory of Redis, or of the data nodes)"
    )


def _full(used: int, most: int, on_nodes: int = 0) -> str:
    what = "the fullest data node is full (all count like it): they use" if on_nodes else "Redis is full: it uses"
    return (
        f"{what} {byte_amount(used)} of {byte_amount(most)}. If no step makes room, raise its maxmemory "
        "(redis-cli CONFIG SET maxmemory ...)"
    )


_SENTENCES: dict[str, Callable[..., str]] = {
    "closed": _closed,
    "weights": _weights,
    "staleness": _staleness,
    "complete": _complete,
    "memory": _memory,
    "full": _full,
}


ERRORS: dict[str, type[BoardError]] = {
    "FENCED": Fenced,
    "STEPCONFLICT": StepConflict,
    "RUNMISSING": RunMissing,
    "RUNEXISTS": RunExists,
    "NOGROUP": RunMissing,
    "CONFLICT": BoardError,
    "TOOLATE": TooLate,
}
COMMENT = re.compile(r"^ *--.*", re.MULTILINE)
DELETE_UNWANTED = """#!lua flags=allow-oom
for key in function() return redis.call('LPOP', KEYS[1]) or nil end do redis.call('UNLINK', key) end
"""
"""Lua script that deletes all Redis keys that a list names, and the list."""
GROWING = {"publish", "create"}
"""Scripts that a full Redis refuses to run. It must run all other scripts, because they free memory."""
LIBRARY, SIDES = "library", ("coordinator", "stage", "trainer")
"""Folders within `lua`: one of files that scripts include, and one of scripts for each side of the board."""
SHARED = dict.fromkeys(("publish", "room", "relieve", "memory"), ("admission",))
"""Names of the files in lua/library that a script includes in addition to common.lua, by script."""


@cache
def script_text(name: str) -> str:
    """Return the source of a script with its libraries. Comments become empty lines."""
    flags = "" if name in GROWING else " flags=allow-oom"
    library = _files(LIBRARY)
    files = [*(library[one] for one in ("common", *SHARED.get(name, ()))), _scripts()[name]]
    return f"#!lua{flags}\n" + COMMENT.sub("", "".join(file.read_text() for file in files))


@cache
def script_names() -> tuple[str, ...]:
    """Return the names of all of the board's scripts."""
    return tuple(sorted(_scripts()))


@cache
def _scripts() -> dict[str, Traversable]:
    """Return the files of the scripts by script name, from the folders of all sides of the board."""
    return {name: file for side in SIDES for name, file in _files(side).items()}


def _files(folder: str) -> dict[str, Traversable]:
    files = (resources.files("relaxd.board") / "lua" / folder).iterdir()
    return {file.name.removesuffix(".lua"): file for file in files}


@cache
def script_hash(name: str) -> str:
    """Return the SHA-1 by which EVALSHA calls a loaded script."""
    return sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


def script_loads() -> list[Command]:
    """Return the commands that load all scripts into Redis. Redis forgets scripts when it restarts."""
    return [("SCRIPT LOAD", script_text(name)) for name in script_names()]


@contextmanager
def loading() -> Iterator[None]:
    """Ignore errors of an unavailable Redis while scripts are loaded: the operation that needs them is retried."""
    try:
        yield
    except RedisError as error:
        if not passing(error):
            raise
        logger.debug("Redis became unavailable while scripts were loaded: %s", error)


def translate(error: ResponseError) -> BoardError:
    """Return the exception for a script's error reply; the reply's first word is the kind of the error."""
    kind, _, detail = str(error).partition(" ")
    if kind == "GATE":
        return GateClosed(*explain_limit(detail))
    if kind in ERRORS:
        return ERRORS[kind](detail)
    return BoardError(str(error))


def script_call(name: str, prefix: str, *arguments: Any) -> Command:
    """Return the Redis command that runs a script with a run's key prefix and these arguments."""
    return ("EVALSHA", script_hash(name), 1, prefix, *arguments)


def run_script(
    name: str, prefix: str, *arguments: Any, before: Iterable[Command] = (), values: Sequence[Any] = ()
) -> RedisOperation[Any]:
    """Run one script, in one round trip with the commands in `before`. Returns the script's reply.

    `values`, alternating keys and payloads, are set right after the script, in one transaction with it. Keys that the
    script lists as `unwanted` are deleted at the transaction's end.
    """
    if not values:
        replies = yield Send((*before, script_call(name, prefix, *arguments)), how="write")
        return replies[-1]
    # By its text, not by its hash: a Redis that forgot the script must not set the values without it.
    script = ("EVAL", script_text(name), 1, prefix, *arguments)
    tidy = ("EVAL", DELETE_UNWANTED, 1, f"{prefix}unwanted")
    replies = yield Send((*before, ("MULTI",), script, ("MSET", *values), tidy, ("EXEC",)), how="write")
    return replies[-1][0]
