"""Confines a process with limits of memory, output, files and system calls."""

import math
import os
import resource
import sys
from dataclasses import dataclass

from relaxd.sandbox import landlock, seccomp
from relaxd.sandbox.privileges import die_with_parent, drop_capabilities, no_new_privileges


@dataclass(frozen=True)
class Limits:
    """Limits of time, memory, output and files for each confined process."""

    seconds: float = 3.0
    """Maximum processor time of each function call or job, in seconds."""
    memory_bytes: int = 512 << 20
    """Maximum address space of the process, in bytes."""
    output_bytes: int = 1 << 20
    """Maximum output of the process, or size of a result that it returns, in bytes."""
    confine_files: bool = True
    """True to make all files except Python's own unreadable, which needs Landlock. In no case can the process write
    files."""


CPU_SECONDS = 600
"""Maximum total processor time of a confined process, in seconds; the kernel then ends it, even without a watcher."""
OPEN_FILES = 64
_SYSTEM = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache"),
    *("/etc/localtime", "/dev/null", "/dev/urandom"),
)


class ConfinementError(RuntimeError):
    """This machine can't confine processes; the message says why."""


def check(limits: Limits) -> None:
    """Check that this machine has the features that confine processes. Raises ConfinementError with the missing one."""
    if sys.platform != "linux" or not seccomp.supported():
        raise ConfinementError("confining code needs Linux on x86-64 or arm64")
    if limits.confine_files and not landlock.version():
        raise ConfinementError(
            "this kernel has no Landlock (Linux 5.13 or newer, named in its parameter lsm=), so the code could read "
            "every file that this user can"
        )


def make_rules(limits: Limits) -> int | None:
    """Create the Landlock ruleset for `confine`, shared by all processes, and return its file descriptor.

    Returns None if limits.confine_files is False. Raises OSError.
    """
    if not limits.confine_files:
        return None
    prefixes = {sys.prefix, sys.base_prefix}
    python = {os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64")}
    readable = dict.fromkeys([*sorted(python), *_SYSTEM], landlock.LOOK)
    return landlock.make_rules(readable, network=False)


def confine(limits: Limits, rules: int | None) -> None:
    """Permanently confine this process, which must have a single thread. Raises OSError.

    Afterwards the process can read only Python's own files, can't write files, use the network or start processes, and
    can signal only itself. `rules` is the ruleset from `make_rules`; None: readable files stay readable.
    """
    die_with_parent()
    for what, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.output_bytes),
        (resource.RLIMIT_CPU, max(CPU_SECONDS, math.ceil(limits.seconds))),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    drop_capabilities()
    no_new_privileges()
    if rules is not None:
        landlock.restrict(rules)
        os.close(rules)
    seccomp.filter_calls(os.getpid())
