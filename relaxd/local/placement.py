"""Replicas of each role that commands start: their options, else the section [placement], else the table of roles."""

from collections.abc import Mapping

from relaxd.board import roles_for
from relaxd.config import RunConfig
from relaxd.config.load_toml import Problem
from relaxd.local.devices import check_devices
from relaxd.roles import ROLES, SCALABLE_ROLES


def default_replicas() -> dict[str, int]:
    """Return the replicas of each role to start without a run."""
    return {role: ROLES[role].replicas for role in SCALABLE_ROLES}


def placed_replicas(config: RunConfig, given: Mapping[str, int]) -> dict[str, int]:
    """Return the replicas of each role for a run whose placement has no problems.

    Roles that the run needs have at least the fewest with which it works. `given` are replicas by role that take
    precedence, such as options of the command line.
    """
    gpus = {role: count // max(1, ROLES[role].gpus(config)) for role, count in config.placement.gpus.items()}
    replicas = {**default_replicas(), **gpus, **config.placement.replicas, **given}
    return replicas | {role: max(ROLES[role].fewest(config), replicas.get(role, 1)) for role in roles_for(config)}


def machine_problems(config: RunConfig, given: Mapping[str, int], visible: int) -> list[Problem]:
    """Check the placement, and that this machine has the GPUs for it: `visible` of them.

    `given` are those of `placed_replicas`.
    """
    found = placement_problems(config, given, visible)
    return found or check_devices(config, placed_replicas(config, given), visible)


def placement_problems(config: RunConfig, given: Mapping[str, int], visible: int = 0) -> list[Problem]:
    """Check that the run has the roles that are placed, and that their GPUs divide among replicas.

    With `visible`, the number of this machine's GPUs, also that no role wants more of them. Roles that are `given`
    are left out.
    """
    problems = []
    for name, numbers in (("replicas", config.placement.replicas), ("gpus", config.placement.gpus)):
        for role, number in numbers.items():
            if role not in given and (wrong := _problem(config, role, number, name == "gpus", visible)):
                problems.append(Problem(f"placement.{name}.{role}", f"= {number}, but {wrong}"))
    return problems


def _problem(config: RunConfig, role: str, number: int, are_gpus: bool, visible: int) -> str:
    """Return the problem of a role's replicas or GPUs; "" if there is none."""
    each, most = ROLES[role].gpus(config), ROLES[role].most
    if role not in roles_for(config):
        return "the run has no such role: remove it"
    if are_gpus and not each:
        return f"{role} replicas use no GPU: give placement.replicas.{role}"
    if are_gpus and number % each:
        return f"a replica has {each} GPUs: use a multiple, such as {max(number // each, 1) * each}"
    count = number // each if are_gpus else number
    if most and count > most:
        return f"that is {count} replicas, and there may be {most}"
    if visible and count * each > visible:
        return f"that needs {count * each} GPUs, and this machine shows {visible}"
    return ""
