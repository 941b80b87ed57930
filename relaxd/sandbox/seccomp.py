"""A filter of system calls (seccomp): what it denies fails with EPERM. A process can't take it off again."""

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
import termios
from collections.abc import Sequence

from relaxd.sandbox.syscalls import ADMINISTRATION, ARGUMENTS, DENIED, SOCKETS, WRITING

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the kernel's struct seccomp_data."""
_X32 = 0x40000000
"""Numbers of x86-64's second set of calls begin here."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the column of the table of calls, and the kernel's name (AUDIT_ARCH)."""
_SET_SECCOMP, _MODE_FILTER = 22, 2
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
"""Flags of clone for every namespace but that of time, which clone can't make."""
_SET_PARENT_DEATH_SIGNAL = 1
_SOCKET_TYPE = 0xF
"""Bits of socketpair's second argument that are the type; the others are flags."""
_FCNTL = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL)
"""Commands of fcntl that an answer may use: none that makes the kernel send signals, locks a file or leases it."""
_IOCTL = (*(termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX),)
"""Commands of ioctl that an answer may use: none that makes the kernel send signals, or changes a file's attributes."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def supported() -> bool:
    """Return whether the filter knows this machine's system calls."""
    return platform.machine() in _ARCHITECTURES


def filter_calls(pid: int) -> None:
    """Deny this process, whose id is `pid`, what the tables of calls say. Raises OSError.

    It may signal only itself, start threads but no processes, open files only for reading, and send only to the other
    end of a pair of stream sockets.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    code = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL)]
    code += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _deny(errno.EPERM)]
    for numbers in (*DENIED.values(), *WRITING.values()):
        if (number := numbers[column]) is not None:
            code += [_step(_EQUAL, number, 0, 1), _deny(errno.EPERM)]
    rules = {
        "clone": _unless(_step(_ANY_BIT, _CLONE_THREAD, 1, 0)),
        "clone3": [_deny(errno.ENOSYS)],  # its flags can't be seen; libraries then use clone
        "kill": _unless(_step(_EQUAL, pid, 1, 0)),
        "tgkill": _unless(_step(_EQUAL, pid, 1, 0)),
        "prlimit64": _unless(_step(_EQUAL, 0, 1, 0)),
        "prctl": _unless(_step(_EQUAL, _SET_PARENT_DEATH_SIGNAL, 0, 1)),
        "open": _unless(_step(_ANY_BIT, _WRITES, 0, 1), argument=1),
        "openat": _unless(_step(_ANY_BIT, _WRITES, 0, 1), argument=2),
        "socketpair": [
            *_deny_unless_equal(0, socket.AF_UNIX),
            *(_load(1), _step(_AND, _SOCKET_TYPE), _step(_EQUAL, socket.SOCK_STREAM, 1, 0), _deny(errno.EPERM)),
            _step(_RETURN, _ALLOW),
        ],
        "sendto": [
            *(step for half in (0, 4) for step in _deny_unless_equal(4, 0, half)),  # a null pointer: no address
            _step(_RETURN, _ALLOW),
        ],
        "fcntl": _only(_FCNTL, argument=1),
        "ioctl": _only(_IOCTL, argument=1),
    }
    for name, numbers in ARGUMENTS.items():
        if (number := numbers[column]) is not None:
            code += [_step(_EQUAL, number, 0, len(rules[name])), *rules[name]]
    _install([*code, _step(_RETURN, _ALLOW)])


def filter_programs(network: bool) -> None:
    """Deny this process and the programs that it starts, which are trusted more, what only administrators need.

    It may make no namespaces, mounts or tracers, and no sockets but local ones unless `network` says so: those fail as
    if there were no network. Raises OSError, also where the filter doesn't know this machine's system calls.
    """
    if not supported():
        raise OSError(errno.ENOSYS, "the filter of system calls (seccomp) needs x86-64 or arm64")
    column, architecture = _ARCHITECTURES[platform.machine()]
    code = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _deny(errno.EPERM)]
    code += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _deny(errno.EPERM)]
    for name in ADMINISTRATION:
        if (number := DENIED[name][column]) is not None:
            code += [_step(_EQUAL, number, 0, 1), _deny(errno.EPERM)]
    rules = {
        "clone": _unless(_step(_ANY_BIT, _CLONE_NAMESPACES, 0, 1)),
        "clone3": [_deny(errno.ENOSYS)],  # its flags can't be seen; libraries then use clone
    }
    numbers: dict[str, tuple[int, int | None]] = {name: ARGUMENTS[name] for name in rules}
    if not network:
        rules |= dict.fromkeys(SOCKETS, _unless(_step(_EQUAL, socket.AF_UNIX, 1, 0), error=errno.ENETUNREACH))
        numbers |= SOCKETS
    for name, rule in rules.items():
        if (number := numbers[name][column]) is not None:
            code += [_step(_EQUAL, number, 0, len(rule)), *rule]
    _install([*code, _step(_RETURN, _ALLOW)])


def _install(code: Sequence[bytes]) -> None:
    text = ctypes.create_string_buffer(b"".join(code))
    program = _Program(len(code), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"the filter of system calls (seccomp) can't be set: {os.strerror(number)}")


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _deny(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _load(argument: int, half: int = 0) -> bytes:
    """Return the step that loads an argument: its lower half, or its upper one (`half` = 4)."""
    return _step(_LOAD, _FIRST_ARGUMENT + 8 * argument + half)


def _unless(test: bytes, argument: int = 0, error: int = errno.EPERM) -> list[bytes]:
    """Return the steps that deny a call unless `test` of its argument (the lower half) skips the denial."""
    return [_load(argument), test, _deny(error), _step(_RETURN, _ALLOW)]


def _only(values: Sequence[int], argument: int) -> list[bytes]:
    """Return the steps that deny a call unless its argument (the lower half) is one of `values`."""
    tests = [_step(_EQUAL, value, len(values) - number, 0) for number, value in enumerate(values)]
    return [_load(argument), *tests, _deny(errno.EPERM), _step(_RETURN, _ALLOW)]


def _deny_unless_equal(argument: int, value: int, half: int = 0) -> list[bytes]:
    """Return the steps that deny a call unless half of its argument is `value`, and else go on."""
    return [_load(argument, half), _step(_EQUAL, value, 1, 0), _deny(errno.EPERM)]
