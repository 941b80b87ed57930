"""The file system as a process sees it in a namespace of mounts of its own: read-only, with parts hidden or private."""

import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Sequence

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_HERE = -100
_CLONE, _CLOEXEC, _RECURSIVE, _EMPTY_PATH, _FROM_EMPTY_PATH = 1, 0o2000000, 0x8000, 0x1000, 4
_READ_ONLY = 1
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
INODES = 100_000
"""Most files and folders in a private folder."""


class _Attributes(ctypes.Structure):
    _fields_ = (
        *(("set", ctypes.c_uint64), ("clear", ctypes.c_uint64)),
        *(("propagation", ctypes.c_uint64), ("users", ctypes.c_uint64)),
    )


def limit_view(
    readable: Iterable[str], writable: Iterable[str], hidden: Iterable[str], private: Sequence[str], private_bytes: int
) -> list[str]:
    """Make everything read-only in this process's namespace of mounts (Linux 5.12 or newer).

    Args:
        readable: what stays to be seen below private folders.
        writable: what can still be written.
        hidden: files and folders that can't be opened.
        private: folders that are empty, in memory, and writable. One that is in `readable` itself isn't replaced.
        private_bytes: most bytes of each of them.

    Returns the private folders. Raises OSError.
    """
    here = os.getcwd()
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    readable, writable = [*map(os.path.realpath, readable)], [*map(os.path.realpath, writable)]
    private = [path for path in map(os.path.realpath, private) if os.path.isdir(path) and path not in readable]
    if not private:
        raise OSError(errno.ENOENT, "no folder can be made private")
    kept = [(path, _clone(path)) for path in writable if os.path.exists(path)]
    for path in readable:
        if any(_is_below(path, folder) for folder in private) and os.path.exists(path) and path not in writable:
            kept.append((path, _clone(path)))
            _make_read_only(kept[-1][1])
    _set_read_only(_HERE, "/", _RECURSIVE)
    for folder in private:
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={private_bytes},nr_inodes={INODES},mode=1777")
    for path, tree in sorted(kept):  # folders before what is in them
        _make_place(path, stat.S_ISDIR(os.fstat(tree).st_mode))
        _call(_MOVE_MOUNT, tree, b"", _HERE, os.fsencode(path), _FROM_EMPTY_PATH)
        os.close(tree)
    for path in map(os.path.realpath, hidden):
        if os.path.exists(path):
            _hide(path, private[0])
    os.chdir(here)  # or else relative paths would still go below the mounts that are covered now
    return list(private)


def show_own_processes() -> None:
    """Have /proc show this process's namespace of processes. Raises OSError: in most containers it can't."""
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_RDONLY)


def _hide(path: str, scratch: str) -> None:
    """Put something that nobody can open over a path."""
    nothing = os.path.join(scratch, ".hidden")
    if is_folder := os.path.isdir(path):
        os.mkdir(nothing, 0)
    else:
        os.close(os.open(nothing, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0))
    _mount(nothing, path, None, _MS_BIND)
    _set_read_only(_HERE, path, 0)
    (os.rmdir if is_folder else os.unlink)(nothing)


def _clone(path: str) -> int:
    return _call(_OPEN_TREE, _HERE, os.fsencode(path), _CLONE | _CLOEXEC | _RECURSIVE)


def _make_read_only(tree: int) -> None:
    _set_read_only(tree, "", _RECURSIVE | _EMPTY_PATH)


def _set_read_only(at: int, path: str, flags: int) -> None:
    wanted = _Attributes(set=_READ_ONLY)
    _call(_MOUNT_SETATTR, at, os.fsencode(path), flags, ctypes.byref(wanted), ctypes.sizeof(wanted))


def _make_place(path: str, is_folder: bool) -> None:
    if is_folder:
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT, 0o600))


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    if libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {target}: {os.strerror(code)}")


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(number, *arguments))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mounts: {os.strerror(code)}")
    return found
