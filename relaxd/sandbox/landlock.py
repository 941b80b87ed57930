"""Landlock: a process permanently gives up access to all files except some (Linux 5.13 or newer)."""

import ctypes
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import PurePath

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _DEVICES = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICES
LIST = _READ_DIR
"""Landlock right to list folders, as a bit mask."""
LOOK = _READ_FILE | _READ_DIR
"""Landlock rights to read files and list folders, as a bit mask."""
READ = _EXECUTE | _READ_FILE | _READ_DIR
"""Landlock rights to read files, run programs, and list folders, as a bit mask."""
USE = READ | _WRITE_FILE | _TRUNCATE | _DEVICES
"""Landlock rights to read, write and control devices, as a bit mask."""
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of rights for files that Landlock supports, by the first version with this number."""
_TCP_VERSION, _SCOPE_VERSION = 4, 6


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("place", ctypes.c_int32))


def version() -> int:
    """Return the kernel's Landlock version; 0 if it has none."""
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE, None, 0, _VERSION)))


def make_rules(allowed: Mapping[str, int], network: bool) -> int:
    """Create a Landlock ruleset, and return its file descriptor. Raises OSError.

    Args:
        allowed: rights by path, as a bit mask; a folder's rights also hold for everything in it. Missing paths are
            skipped.
        network: True to leave TCP connections unrestricted.

    If the kernel supports it, abstract sockets and signals to outside processes are denied as well.
    """
    known, every = version(), every_right()
    rules = _Ruleset(every, 0 if network else 3, 3)
    size = 24 if known >= _SCOPE_VERSION else 16 if known >= _TCP_VERSION else 8
    ruleset = _call(_CREATE, ctypes.byref(rules), size, 0)
    for path, rights in allowed.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue
        try:
            if not stat.S_ISDIR(os.fstat(place).st_mode):
                rights &= _OF_FILES
            rule = _PathBeneath(rights & every, place)
            if rule.allowed:
                _call(_ADD, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(place)
    return ruleset


def every_right() -> int:
    """Return the bit mask of all rights for files that this kernel's Landlock supports."""
    known = version()
    return (1 << max(count for first, count in _FILE_RIGHTS.items() if first <= known)) - 1


def all_but(hidden: Iterable[str]) -> list[str]:
    """Return files and folders that together contain everything except the paths in `hidden`.

    `hidden` has absolute paths without links. Symbolic links are left out: a rule for a link would apply to its target.
    """
    covered = set(hidden)
    above = {str(folder) for path in covered for folder in PurePath(path).parents}
    if not above:
        return ["/"]
    found = []
    for folder in above:
        try:
            with os.scandir(folder) as entries:
                found += [one.path for one in entries if one.path not in covered | above and not one.is_symlink()]
        except OSError:  # a folder that can't be listed is left out
            continue
    return sorted(found)


def restrict(ruleset: int) -> None:
    """Permanently restrict this process to what a Landlock ruleset allows. Call `no_new_privileges` before.

    Raises OSError.
    """
    _call(_RESTRICT, ruleset, 0)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(number, *arguments))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"files can't be confined (Landlock): {os.strerror(code)}")
    return found
