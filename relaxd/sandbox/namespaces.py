"""Namespaces: a process gets a network, mounts, and process ids of its own, where the kernel allows it."""

import ctypes
import os
import signal

from relaxd.sandbox.privileges import die_with_parent, drop_capabilities

NETWORK, MOUNTS, PROCESSES, MEMORY = "network", "mounts", "processes", "memory"
_FLAGS = {MOUNTS: 0x00020000, PROCESSES: 0x20000000, MEMORY: 0x08000000, NETWORK: 0x40000000}
_NEW_USER = 0x10000000


class Namespaces:
    """The namespaces that this process has entered."""

    def __init__(self) -> None:
        self.user = False
        """Whether it has one of users: its capabilities are worth nothing outside."""
        self.entered: set[str] = set()
        self.refused = ""
        """Why the first could not be entered; empty if all were."""

    def enter(self, *kinds: str) -> None:
        """Enter those that the kernel allows. The process must have a single thread.

        Who isn't root, or a root without capabilities, needs one of users first.
        """
        for kind in kinds:
            try:
                if not self.user and not self.entered:
                    self._enter_first(kind)
                else:
                    _unshare(_FLAGS[kind])
                self.entered.add(kind)
            except OSError as error:
                self.refused = self.refused or str(error.strerror)

    def _enter_first(self, kind: str) -> None:
        try:
            _unshare(_FLAGS[kind])
            return
        except PermissionError:
            user, group = os.geteuid(), os.getegid()
            _unshare(_NEW_USER)
            self.user = True
        for path, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)
        _unshare(_FLAGS[kind])


def fork_inside() -> None:
    """Go on in a child, which is in the namespace of processes that this process has made; this one ends as it does.

    A second child is the namespace's first process, with which all others there end.
    """
    if os.fork() == 0:
        _reap()
    if worker := os.fork():
        _accompany(worker)
    die_with_parent()


def _reap() -> None:
    """Be the first process of a namespace, until the parent ends."""
    try:
        _withdraw()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _accompany(worker: int) -> None:
    """End as a child does."""
    code = 1
    try:
        _withdraw()
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        if code < 0:
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code if code >= 0 else 1)


def _withdraw() -> None:
    die_with_parent()
    drop_capabilities()
    os.closerange(0, 1 << 16)


def _unshare(flag: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flag):
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
