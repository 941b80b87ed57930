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
"""Maximum number of open files of each process of an enclosed program."""
PROCESSES = 2048
"""Maximum number of processes and threads of an enclosed program, all together."""
USERS = range(61_184, 65_520)
"""User ids under which enclosed programs run: the range that systemd reserves for dynamic users."""
DEVICES = (
    *("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "kfd", "dri", "nvidiactl", "nvidia-uvm"),
    *("nvidia-uvm-tools", "nvidia-caps", "nvidia-modeset", *(f"nvidia{number}" for number in range(16))),
)
"""Names of devices in /dev that an enclosed program may use."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Permissions of an enclosed program: network, memory, and the files that it may read and write."""

    network: bool = False
    """True if the program may use the network."""
    memory_bytes: int = 4 << 30
    """Maximum memory of each of the program's processes, in bytes; 0: no limit. Shared memory and mapped files don't
    count (RLIMIT_DATA)."""
    writable: tuple[str, ...] = ()
    """Paths that the program may write, besides `own`; their owner doesn't change."""
    own: tuple[str, ...] = ()
    """Folders that the program may write. If the program runs as an unused user, that user becomes their owner."""
    temporary: str = ""
    """Folder in `own` for temporary files (TMPDIR); also the home if the program's user can't enter the real home. "":
    TMPDIR and HOME stay."""
    hidden: tuple[str, ...] = ()
    """Files and folders that the program can't open; all others are readable."""
    needed: tuple[str, ...] = ()
    """Paths that the program must be able to read. If an unused user couldn't read them, the program keeps the
    service's user."""

    def to_json(self) -> str:
        """Return the plan as JSON text, which `from_json` parses."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan in a JSON text from `to_json`."""

        def value(given: Any) -> Any:
            return tuple(given) if isinstance(given, list) else given

        return cls(**{name: value(given) for name, given in json.loads(text).items()})


@dataclass(frozen=True)
class Measure:
    """One of the restrictions that enclose a program, and whether it is enforced on this machine."""

    name: str
    """Subject of the restriction: "network", "files", "memory", "processes", "kernel" or "user"."""
    by: str = ""
    """Mechanism that enforces the measure, such as "Landlock"; empty if none does."""
    missing: str = ""
    """Reason why the measure isn't enforced; empty if it is."""


def enclose(plan: Plan) -> list[Measure]:
    """Permanently restrict this process as `plan` says. The process must have a single thread.

    Returns all measures, with the reason for those that can't be enforced.
    """
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
    """Switch this process from root to an unused user.

    The user stays root if another user couldn't read the plan's files, or would become the owner of files that the
    program writes elsewhere.
    """
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
    """Limit the program's number of processes, if Linux can count them apart from the service's.

    Linux can if the program has a separate user (`changed`), or else enters a user namespace.
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
    """Permanently lower a resource limit (resource.RLIMIT_*) of this process to at most `most`."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


if __name__ == "__main__":  # prints which measures hold here
    print(json.dumps([asdict(one) for one in enclose(Plan())]))
