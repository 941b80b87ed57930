"""Encloses a program that is trusted more than a model's answer, such as a reward function: it may read files and start
programs.

As far as the kernel allows, it has no network, writes only its own files, reads no secrets, has bounded memory and
processes, and runs as another user than the service. The measures are independent; each reports whether it is enforced.
"""

import json
import os
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from relaxd.sandbox import landlock, privileges, seccomp

OPEN_FILES = 4096
"""Maximum number of open files of a process."""
PROCESSES = 2048
"""Maximum total number of a program's processes and threads."""
USERS = range(61_184, 65_520)
"""User ids that are otherwise unused: the range that systemd reserves for dynamic users."""
DEVICES = (
    *("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "kfd", "dri", "nvidiactl", "nvidia-uvm"),
    *("nvidia-uvm-tools", "nvidia-caps", "nvidia-modeset", *(f"nvidia{number}" for number in range(16))),
)
"""Devices in /dev that an enclosed program may use."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rights of an enclosed program."""

    network: bool = False
    """True if the program may use the network."""
    memory_bytes: int = 4 << 30
    """Maximum memory of each process, in bytes (RLIMIT_DATA: without shared memory and mapped files); 0: no limit."""
    writable: tuple[str, ...] = ()
    """Writable paths besides `own`."""
    own: tuple[str, ...] = ()
    """Writable folders whose owner becomes the program's user."""
    temporary: str = ""
    """Folder in `own` for temporary files, and the home if the program's user can't enter the real one; "": no
    change."""
    hidden: tuple[str, ...] = ()
    """Files and folders that the program can't open; all others are readable."""
    needed: tuple[str, ...] = ()
    """Paths that the program must read; the user isn't changed if another user couldn't read them."""

    def to_json(self) -> str:
        """Return JSON for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Parse the JSON of `to_json`."""

        def value(given: Any) -> Any:
            return tuple(given) if isinstance(given, list) else given

        return cls(**{name: value(given) for name, given in json.loads(text).items()})


@dataclass(frozen=True)
class Measure:
    """A part of the enclosure."""

    name: str
    """One of network, files, memory, processes, kernel, user."""
    by: str = ""
    """Mechanism that enforces the measure; empty if none does."""
    missing: str = ""
    """Reason why the measure isn't enforced; empty if it is."""


def enclose(plan: Plan) -> list[Measure]:
    """Enclose this process, which must have a single thread, for good. Returns all measures, failed ones included."""
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    user = _change_user(plan)
    processes = _limit_processes(changed=bool(user.by))
    privileges.drop_capabilities()
    privileges.no_new_privileges()
    privileges.die_with_parent()  # a change of user would have undone it
    if plan.temporary:
        os.environ["TMPDIR"] = plan.temporary
        if not os.access(os.path.expanduser("~"), os.X_OK):
            os.environ["HOME"] = plan.temporary
    return [_limit_files(plan), *_limit_memory(plan), processes, *_limit_calls(plan), user]


def _change_user(plan: Plan) -> Measure:
    """Become an unused user, unless the plan's files would then be inaccessible or owned by that user."""
    if os.geteuid() != 0:
        return Measure("user", missing="only root can change it")
    if plan.writable:
        return Measure("user", missing="what it writes should stay the service's")
    user, groups = USERS[os.getpid() % len(USERS)], os.getgroups()
    try:
        os.setgroups([])
        os.setegid(user)
        os.seteuid(user)
    except OSError as error:
        return Measure("user", missing=f"the service's root can't change it: {error.strerror}")
    unreadable = [path for path in plan.needed if not _is_readable(path)]
    os.seteuid(0)
    os.setegid(0)
    if unreadable:
        os.setgroups(groups)
        return Measure("user", missing=f"another user couldn't read {unreadable[0]}")
    for path in plan.own:
        os.chown(path, user, user)
    privileges.become(user)
    return Measure("user", f"user {user}")


def _is_readable(path: str) -> bool:
    return os.access(path, os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK, effective_ids=True)


def _limit_processes(changed: bool) -> Measure:
    """Limit processes if Linux can count this program's alone: under another user, or in a user namespace.

    `changed` is True if the program has become another user.
    """
    if not changed and os.geteuid() == 0:
        return Measure("processes", missing="Linux doesn't limit root's")
    try:
        if not changed:
            privileges.enter_user_namespace()
    except OSError as error:
        return Measure("processes", missing=f"no namespace of users ({error.strerror})")
    lower_limit(resource.RLIMIT_NPROC, PROCESSES)
    return Measure("processes", f"{PROCESSES} in all")


def _limit_files(plan: Plan) -> Measure:
    if not landlock.version():
        return Measure("files", missing="no Landlock: Linux 5.13 or newer has it, if its parameter lsm= names it")
    hidden = [os.path.realpath(path) for path in plan.hidden if os.path.lexists(path)]
    allowed = {"/": landlock.LIST}
    allowed |= dict.fromkeys(landlock.all_but([*hidden, "/dev"]), landlock.READ)
    allowed |= {f"/dev/{name}": landlock.USE for name in DEVICES}
    allowed |= dict.fromkeys(map(os.path.realpath, (*plan.writable, *plan.own, "/dev/shm")), landlock.every_right())
    try:
        rules = landlock.make_rules(allowed, network=True)  # the filter of system calls refuses more of it
        landlock.restrict(rules)
        os.close(rules)
    except OSError as error:
        return Measure("files", missing=str(error))
    return Measure("files", "Landlock")


def _limit_memory(plan: Plan) -> Sequence[Measure]:
    if not plan.memory_bytes:
        return []
    lower_limit(resource.RLIMIT_DATA, plan.memory_bytes)
    return [Measure("memory", f"{plan.memory_bytes / (1 << 30):.3g} GiB for each process")]


def _limit_calls(plan: Plan) -> Sequence[Measure]:
    names = ["kernel"] if plan.network else ["network", "kernel"]
    try:
        seccomp.filter_programs(plan.network)
    except OSError as error:
        return [Measure(name, missing=str(error)) for name in names]
    return [Measure(name, "a filter of system calls") for name in names]


def lower_limit(what: int, most: int) -> None:
    """Lower a limit of this process for good; a limit that is already lower stays."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


if __name__ == "__main__":  # prints which measures hold here
    print(json.dumps([asdict(one) for one in enclose(Plan())]))
