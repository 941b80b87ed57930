"""What a process gives up for good: capabilities, privileges that programs bring, another user's rights."""

import ctypes
import os
import signal

_CAPABILITIES_VERSION = 0x20080522
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38


def no_new_privileges() -> None:
    """Give up privileges that a program may bring (set-user-id), which unprivileged restrictions ask for.

    Raises OSError.
    """
    _prctl(_SET_NO_NEW_PRIVILEGES, 1, "PR_SET_NO_NEW_PRIVS")


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends. A change of user undoes it. Raises OSError."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, "PR_SET_PDEATHSIG")


def drop_capabilities() -> None:
    """Give up what root may do; other users have nothing to give up. Raises OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())):
        raise OSError(ctypes.get_errno(), "capabilities can't be given up")


def become(user: int) -> None:
    """Become another user, with a group of the same number and no others. Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _prctl(_SET_DUMPABLE, 1, "PR_SET_DUMPABLE")  # or else its own files in /proc are root's


def _prctl(option: int, value: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"{name} can't be set")
