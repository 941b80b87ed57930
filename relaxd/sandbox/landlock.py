"""Landlock: a process gives up access to all files but some, for good (Linux 5.13 or newer)."""

import ctypes
import os
import stat
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights by the first version that has so many."""
_TCP_VERSION, _SCOPE_VERSION = 4, 6
_SET_NO_NEW_PRIVILEGES = 38


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("place", ctypes.c_int32))


def version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE, None, 0, _VERSION)))


def make_ruleset(readable: Iterable[str]) -> int:
    """Return the descriptor of a set of rules: what may be read; nothing may be written. Raises OSError.

    Paths that don't exist are left out. Connections by TCP, abstract sockets, and signals to processes outside are
    denied as well where the kernel can.
    """
    known = version()
    rights = max(count for first, count in _FILE_RIGHTS.items() if first <= known)
    rules = _Ruleset((1 << rights) - 1, 3, 3)
    size = 24 if known >= _SCOPE_VERSION else 16 if known >= _TCP_VERSION else 8
    ruleset = _call(_CREATE, ctypes.byref(rules), size, 0)
    for path in readable:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            is_folder = stat.S_ISDIR(os.fstat(place).st_mode)
            rule = _PathBeneath(_READ_FILE | _READ_DIR if is_folder else _READ_FILE, place)
            _call(_ADD, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(place)
    return ruleset


def restrict(ruleset: int) -> None:
    """Allow this process from now on only what a set of rules says. Needs `no_new_privileges`. Raises OSError."""
    _call(_RESTRICT, ruleset, 0)


def no_new_privileges() -> None:
    """Give up privileges that a program may bring (set-user-id), which unprivileged restrictions ask for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS can't be set")


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(number, *arguments))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"files can't be confined (Landlock): {os.strerror(code)}")
    return found
