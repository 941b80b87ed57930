"""Number of replicas that commands start for each role, by their options, else [placement], else the table of roles."""

from collections.abc import Mapping

from relaxd.board import roles_for
from relaxd.config import CPU_TRANSPORTS, RunConfig
from relaxd.config.load_toml import Problem
from relaxd.engines import ENGINES, list_engines
from relaxd.roles import JUDGE, ROLES, ROLLOUT, SCALABLE_ROLES, TEACHER, TRAINER


def default_replicas() -> dict[str, int]:
    """Return the number of replicas that are started for each role if no run is known."""
    return {role: ROLES[role].replicas for role in SCALABLE_ROLES}


def placed_replicas(config: RunConfig, given: Mapping[str, int]) -> dict[str, int]:
    """Return the number of replicas of each role for a run. The run's placement must be valid.

    Roles that the run needs get at least their minimum. `given`: replicas by role that take precedence, such as
    options of the command line.
    """
    gpus = {role: count // max(1, ROLES[role].gpus(config)) for role, count in config.placement.gpus.items()}
    replicas = {**default_replicas(), **gpus, **config.placement.replicas, **given}
    return replicas | {role: max(ROLES[role].fewest(config), replicas.get(role, 1)) for role in roles_for(config)}


def machine_problems(config: RunConfig, given: Mapping[str, int], visible: int) -> list[Problem]:
    """Return the problems of a run's placement, also if this machine's `visible` GPUs don't suffice for it.

    `given`: replicas by role that take precedence over [placement].
    """
    found = placement_problems(config, given, visible)
    return found or check_devices(config, placed_replicas(config, given), visible)


def placement_problems(config: RunConfig, given: Mapping[str, int], visible: int = 0) -> list[Problem]:
    """Return the problems of [placement]: roles that the run doesn't use, and GPUs that don't divide among replicas.

    If `visible`, the number of this machine's GPUs, isn't 0, also find roles that need more GPUs. Roles in `given`
    aren't checked.
    """
    problems = []
    for name, numbers in (("replicas", config.placement.replicas), ("gpus", config.placement.gpus)):
        for role, number in numbers.items():
            if role not in given and (wrong := _problem(config, role, number, name == "gpus", visible)):
                problems.append(Problem(f"placement.{name}.{role}", f"= {number}, but {wrong}"))
    return problems


def _problem(config: RunConfig, role: str, number: int, are_gpus: bool, visible: int) -> str:
    """Return the problem of the number of a role's replicas or GPUs; "" if there is none."""
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


def check_devices(config: RunConfig, replicas: Mapping[str, int], visible: int) -> list[Problem]:
    """Return the problems of a run with `replicas`, numbers by role, on a machine with `visible` GPUs.

    Without GPUs, all roles use the CPU. With GPUs, each rank of a role takes one; in a colocated run, a rank of the
    trainer and one of an engine share it. A judge or a teacher that wants a share of a GPU uses the engines' GPUs while
    they suffice.
    """
    engines = replicas.get(ROLLOUT, 1)
    transport = config.weights.transport
    if not visible:
        problems = []
        if transport not in CPU_TRANSPORTS:
            needs = f'= "{transport}" needs GPUs, and this machine shows none: use "gloo"'
            problems.append(Problem("weights.transport", needs))
        sections = {"rollout": config.rollout.engine}
        if TEACHER in roles_for(config):
            sections["roles.teacher"] = config.roles.teacher.engine
        for place, engine in sections.items():
            if ENGINES[engine].needs_gpus:
                others = list_engines(place, lambda one: not one.needs_gpus)
                needs = f'= "{engine}" needs GPUs, and this machine shows none: use {others}'
                problems.append(Problem(f"{place}.engine", needs))
        return problems
    on_gpus = engines * ROLES[ROLLOUT].gpus(config)
    roles = [ROLES[name] for name in roles_for(config)]
    own = {role.name: replicas.get(role.name, 1) * role.gpus(config) for role in roles if not role.takes_turns}
    for role, section in ((JUDGE, config.roles.judge), (TEACHER, config.roles.teacher)):
        if role in own and section.shares_gpus:
            own[role] = max(0, own[role] - on_gpus)
    if config.run.colocate:
        return _check_shared(config, engines, on_gpus, visible, sum(own.values()))
    needed = ROLES[TRAINER].gpus(config) + on_gpus + sum(own.values())
    if needed <= visible:
        return []
    words = f" and {engines} x rollout.tensor_parallel = {on_gpus} of the engines" if on_gpus else ""
    words += "".join(f" and {count} of {role} replicas" for role, count in own.items() if count)
    return [
        Problem(
            "trainer.ranks",
            f"= {config.trainer.ranks}{words} need {needed} GPUs; this machine shows {visible}",
        )
    ]


def _check_shared(config: RunConfig, engines: int, on_gpus: int, visible: int, own: int) -> list[Problem]:
    ranks = config.trainer.ranks
    if config.weights.transport != "cuda_ipc" or not ENGINES[config.rollout.engine].needs_gpus:
        able = list_engines("rollout", lambda engine: engine.needs_gpus and engine.sleeps)
        return [
            Problem(
                "run.colocate",
                f'on GPUs needs rollout.engine = {able} and weights.transport = "cuda_ipc", but they are '
                f'"{config.rollout.engine}" and "{config.weights.transport}"',
            )
        ]
    if on_gpus != ranks:
        return [
            Problem(
                "trainer.ranks",
                f"= {ranks}, but {engines} x rollout.tensor_parallel = {on_gpus} GPUs are the engines': with "
                "run.colocate each GPU has a rank and an engine",
            )
        ]
    if ranks + own > visible:
        beside = f", and {own} beside them for roles that don't take turns" if own else ""
        return [Problem("trainer.ranks", f"= {ranks} needs {ranks} GPUs{beside}; this machine shows {visible}")]
    return []
