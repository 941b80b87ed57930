"""Settings that lift the limit of the enclosure that a reward has hit."""

import errno
import socket
import subprocess
from collections.abc import Iterator, Sequence

from relaxd.sandbox.enclosure import PROCESSES, Measure, Plan

_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOOKS_LIKE_NO_NETWORK = (
    *("Network is unreachable", "Network unreachable", "name resolution", "Name or service not known"),
    *("Could not resolve host", "Couldn't connect to server", "Failed to connect to"),
)
"""Of libraries and programs whose errors have no number."""
_LOOKS_LIKE_NOT_ALLOWED = (
    *("Permission denied", "Read-only file system", "unable to open database file", "readonly database"),
)
"""The same of files: of sqlite3, and of libraries in C++ and Rust such as torch and safetensors."""
_FILES = (
    "rewards write only temporary files (tempfile), and can't read relaxd's secrets: name what else they write, or its "
    'folder, in reward.writable, or set reward.sandbox = "off"'
)
MOST_CAUSES = 20
"""Causes of an error that are looked at."""


def hint(error: BaseException, plan: Plan | None, measures: Sequence[Measure]) -> str:
    """Return which limit an error came from, and the setting that changes it; or ""."""
    if plan is None:
        return ""
    held = {one.name: one.by for one in measures if one.by}
    for one in _causes(error):
        if "network" in held and _is_no_network(one):
            return "rewards have no network: set reward.network = true"
        if "memory" in held and isinstance(one, MemoryError):
            return f"a process of a reward has at most {plan.memory_bytes} bytes: raise reward.worker_memory_bytes"
        if "processes" in held and _is_no_process(one):
            return f'a reward has at most {PROCESSES} processes and threads; reward.sandbox = "off" has no limit'
        refused = _is_refused_file(one)
        if refused and "files" in held:
            return _FILES
        if refused and "user" in held:
            return f'rewards run as {held["user"]}; as the service\'s with reward.sandbox = "off"'
    return ""


def _is_no_network(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno == errno.ENETUNREACH):
        return True
    return any(text in _text(error) for text in _LOOKS_LIKE_NO_NETWORK)


def _is_refused_file(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED:
        return error.filename is not None  # else it isn't about a file
    return any(text in _text(error) for text in _LOOKS_LIKE_NOT_ALLOWED)


def _text(error: BaseException) -> str:
    """Return an error's text, and what a program that failed wrote, if that was kept."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = error.stderr or error.output or ""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _is_no_process(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN and not isinstance(error, socket.gaierror)
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it came from."""
    for _ in range(MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
