"""The enclosure of a program that is trusted more than an answer, such as a reward: it uses files and starts programs.

It gets what the kernel allows: no network, no files to write but its own and no secrets to read, bounded memory and
processes, and another user than the service's. Each measure stands by itself and says whether it holds.
"""

import json
import os
import resource
from dataclasses import asdict, dataclass
from typing import Any

from relaxd.sandbox import landlock, mounts, privileges, seccomp
from relaxd.sandbox.namespaces import MEMORY, MOUNTS, NETWORK, PROCESSES, Namespaces, fork_inside

OPEN_FILES = 4096
"""Most open files of a process."""
USERS = range(61_184, 65_520)
"""Users that nobody else is, in systemd's table of ids."""
PRIVATE = ("/tmp", "/dev/shm", "/run")
"""Folders that a program gets for itself; the last only without the network."""
DEVICES = (
    *("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "kfd", "dri", "nvidiactl", "nvidia-uvm"),
    *("nvidia-uvm-tools", "nvidia-caps", "nvidia-modeset", *(f"nvidia{number}" for number in range(16))),
)
"""What may be used of /dev."""


@dataclass(frozen=True)
class Plan:
    """What an enclosed program may do."""

    network: bool = False
    """Reach the network."""
    memory_bytes: int = 4 << 30
    """Memory of each of its processes (RLIMIT_DATA: not what it shares or maps from files); 0: without a limit."""
    processes: int = 1024
    """Processes and threads in all."""
    readable: tuple[str, ...] = ()
    """What it needs to read; all else can be read as well, but in folders that are replaced by private ones."""
    writable: tuple[str, ...] = ()
    """What it may write besides its private folders."""
    hidden: tuple[str, ...] = ()
    """Files that it can't open."""
    given: tuple[str, ...] = ()
    """Files and folders that become another user's with it; they are writable, too."""
    scratch: str = ""
    """Folder for its files where it can't have a private /tmp."""
    private_bytes: int = 1 << 30
    """Most bytes in each private folder, /tmp and /dev/shm."""

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote."""

        def value(given: Any) -> Any:
            return tuple(given) if isinstance(given, list) else given

        return cls(**{name: value(given) for name, given in json.loads(text).items()})


@dataclass(frozen=True)
class Measure:
    """A part of the enclosure."""

    name: str
    """network, files, private files, memory, processes, kernel, user."""
    by: str = ""
    """How it is enforced; empty if it isn't."""
    missing: str = ""
    """Why it isn't, or what it lacks."""


def enclose(plan: Plan) -> list[Measure]:
    """Enclose this process for good, which must have a single thread. Returns what holds and what doesn't.

    It goes on in a child if it can have process ids of its own; then this process ends as the child does.
    """
    return _Enclosing(plan).enclose()


class _Enclosing:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._spaces = Namespaces()
        self._found: list[Measure] = []
        self._private: list[str] = []
        self._view = ""
        """Why there is no private view of the files."""

    def enclose(self) -> list[Measure]:
        privileges.die_with_parent()
        for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, OPEN_FILES)):
            _, hard = resource.getrlimit(what)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (most, most))
        user, stays = _choose_user(self._plan) if os.geteuid() == 0 else (None, "the service isn't root")
        if user is not None:
            for path in (*self._plan.given, *filter(None, [self._plan.scratch])):
                os.chown(path, user, user)
        self._spaces.enter(MOUNTS, PROCESSES, MEMORY, *([] if self._plan.network else [NETWORK]))
        if PROCESSES in self._spaces.entered:
            fork_inside()
        if MOUNTS in self._spaces.entered:
            self._limit_view()
        else:
            self._view = self._spaces.refused
        if user is not None:
            if self._spaces.user:  # in its namespace there is no other
                user, stays = None, "the service's root has no capabilities"
            else:
                privileges.become(user)
        privileges.drop_capabilities()
        privileges.no_new_privileges()
        privileges.die_with_parent()
        self._limit_files()
        self._limit_memory()
        self._limit_processes(user)
        self._limit_calls()
        self._add("user", f"user {user}" if user is not None else "", stays)
        return self._found

    def _add(self, name: str, by: str, missing: str = "") -> None:
        self._found.append(Measure(name, by, "" if by else missing))

    def _limit_view(self) -> None:
        plan = self._plan
        private = PRIVATE[:2] if plan.network else PRIVATE  # the network's names may be resolved in /run
        try:
            self._private = mounts.limit_view(
                plan.readable, (*plan.writable, *plan.given), plan.hidden, private, plan.private_bytes
            )
            if PROCESSES in self._spaces.entered:
                mounts.show_own_processes()
        except OSError as error:
            self._view = str(error.strerror)
        for folder in self._private:
            os.environ["TMPDIR"] = folder
            break

    def _limit_files(self) -> None:
        """Have Landlock refuse what the private view refuses, because it can do so without namespaces."""
        plan = self._plan
        if not self._private and plan.scratch:
            os.environ["TMPDIR"] = plan.scratch
        by = ["read-only mounts"] if self._private else []
        missing = f"no mounts of its own ({self._view})"
        if landlock.version():
            hidden = [os.path.realpath(path) for path in plan.hidden if os.path.lexists(path)]
            every = landlock.every_right()
            allowed = {"/": landlock.LIST}
            allowed |= dict.fromkeys(landlock.all_but([*hidden, "/dev"]), landlock.READ)
            allowed |= {f"/dev/{name}": landlock.USE for name in DEVICES}
            writable = [*plan.writable, *plan.given, *self._private, "/dev/shm"]
            writable += [plan.scratch] if plan.scratch and not self._private else []
            allowed |= dict.fromkeys(map(os.path.realpath, writable), every)
            try:
                rules = landlock.make_rules(allowed, network=True)
                landlock.restrict(rules)
                os.close(rules)
                by.append("Landlock")
            except OSError as error:
                missing += f", no Landlock ({os.strerror(error.errno or 0)})"
        else:
            missing += ", no Landlock (Linux 5.13 or newer, named in its parameter lsm=)"
        self._add("files", " and ".join(by), missing)
        self._add("private files", ", ".join(self._private), self._view)

    def _limit_memory(self) -> None:
        if most := self._plan.memory_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            self._add("memory", f"{most / (1 << 30):.3g} GiB for each process")

    def _limit_processes(self, user: int | None) -> None:
        """Limit processes where the kernel counts only this program's: by user, or by user in a namespace."""
        if user is not None or (self._spaces.user and os.getuid() != 0):
            most = self._plan.processes
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            self._add("processes", f"{most} in all, which end with it")
        else:
            why = "Linux doesn't limit root's" if os.getuid() == 0 else self._spaces.refused
            self._add("processes", "", f"no limit of its own ({why})")

    def _limit_calls(self) -> None:
        plan, error = self._plan, ""
        own_network = NETWORK in self._spaces.entered
        filtered = False
        if seccomp.supported():
            try:
                seccomp.filter_programs(network=plan.network or own_network)
                filtered = True
            except OSError as failed:
                error = str(failed)
        else:
            error = "the filter of system calls needs x86-64 or arm64"
        if not plan.network:
            by = "a network namespace of its own" if own_network else "a filter of system calls" if filtered else ""
            self._add("network", by, f"{self._spaces.refused}; {error}")
        self._add("kernel", "a filter of system calls" if filtered else "", error)


def _choose_user(plan: Plan) -> tuple[int | None, str]:
    """Return a user for this process, or else why it stays root: another one couldn't read what it needs."""
    user, groups = USERS[os.getpid() % len(USERS)], os.getgroups()
    readable = [path for path in plan.readable if os.path.exists(path)]
    try:
        os.setgroups([])
        os.setegid(user)
        os.seteuid(user)
    except OSError as error:
        return None, f"the service's root can't be another user: {error.strerror}"
    try:
        unreadable = [path for path in readable if not _readable(path)]
        unreadable += [path for path in plan.writable if not os.access(path, os.W_OK, effective_ids=True)]
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
    return (None, f"another user couldn't use {unreadable[0]}") if unreadable else (user, "")


def _readable(path: str) -> bool:
    needed = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return os.access(path, needed, effective_ids=True)
