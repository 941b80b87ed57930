"""The table of the doctor's checks, and the commands that run some of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from relaxd.tools.doctor import Finding, Scope
from relaxd.tools.doctor.gpus import check_gpus
from relaxd.tools.doctor.host import (
    check_clock,
    check_disk,
    check_limits,
    check_sandbox,
    check_shared_memory,
    check_system,
)
from relaxd.tools.doctor.packages import check_optional_packages, check_packages, check_trackers
from relaxd.tools.doctor.services import (
    check_coordinator_port,
    check_docker,
    check_redis,
    check_redis_program,
    check_services,
    check_weight_ports,
)

Moment = Literal["config", "run", "up", "compose"]
"""Commands that run some of the doctor's checks before they start: "config" is `relaxd config check`, "run" is `run`
and `resume`, "up" is `up`, "compose" is `up --compose`."""


@dataclass(frozen=True)
class Check:
    """A check, and the commands that run it before they start anything. Such a check takes milliseconds."""

    find: Callable[[Scope], Iterable[Finding]]
    moments: tuple[Moment, ...] = ()


CHECKS = (
    Check(check_system),
    Check(check_packages, ("config", "run", "up")),
    Check(check_optional_packages),
    Check(check_trackers, ("config", "run")),
    Check(check_gpus, ("config", "run", "up")),
    Check(check_shared_memory, ("config", "run", "up")),
    Check(check_limits, ("run", "up")),
    Check(check_disk, ("config", "run", "up")),
    Check(check_clock, ("run", "up")),
    Check(check_coordinator_port),
    Check(check_weight_ports, ("config", "run")),
    Check(check_redis, ("run", "up")),
    Check(check_redis_program),
    Check(check_services),
    Check(check_sandbox),
    Check(check_docker, ("compose",)),
)
"""All checks, in the order in which the doctor prints them."""


def examine(scope: Scope, moment: Moment | None = None) -> Iterable[Finding]:
    """Run the checks and yield what they find. If `moment` names a command, run only its checks, and yield only
    warnings and problems."""
    for check in CHECKS:
        if moment is None or moment in check.moments:
            yield from (one for one in check.find(scope) if moment is None or one.level in ("warning", "problem"))
