"""What to set when a reward hits a limit of its enclosure."""

import errno
import os
import socket
from collections.abc import Iterator, Sequence

from relaxd.sandbox.enclosure import Measure, Plan

_NO_NETWORK = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOOK_LIKE_NO_NETWORK = ("Network is unreachable", "name resolution", "Name or service not known")
_WHERE_TO_WRITE = (
    "rewards can't read relaxd's secrets, and write only in tempfile.gettempdir(): name what else they write, or its "
    "folder, in reward.writable"
)
MOST_CAUSES = 20
"""Causes of an error that are looked at."""


def hint(error: BaseException, plan: Plan | None, measures: Sequence[Measure]) -> str:
    """Return which limit an error came from, and the setting that changes it; or ""."""
    if plan is None:
        return ""
    held = {one.name for one in measures if one.by}
    for one in _causes(error):
        if "network" in held and _is_no_network(one):
            return "a reward needs the network: set reward.network = true"
        if "memory" in held and isinstance(one, MemoryError):
            return f"a process of a reward has at most {plan.memory_bytes} bytes: raise reward.worker_memory_bytes"
        if not isinstance(one, OSError):
            if "files" in held and os.strerror(errno.EROFS) in str(one):
                return _WHERE_TO_WRITE
            if isinstance(one, RuntimeError) and "can't start new thread" in str(one) and "processes" in held:
                return _too_many(plan)
            continue
        if one.errno == errno.EAGAIN and one.filename is None and "processes" in held:
            return _too_many(plan)
        if one.errno == errno.ENOSPC and "private files" in held:
            return f"a worker's /tmp has {plan.private_bytes} bytes: for more, name a folder in reward.writable"
        if one.errno in _NOT_ALLOWED and "files" in held and one.filename is not None:
            return f"{_WHERE_TO_WRITE} (here {one.filename!r})"
    return ""


def _too_many(plan: Plan) -> str:
    return f"a reward may have {plan.processes} processes and threads"


def _is_no_network(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno in _NO_NETWORK:
        return True
    return any(text in str(error) for text in _LOOK_LIKE_NO_NETWORK)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it came from."""
    for _ in range(MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
