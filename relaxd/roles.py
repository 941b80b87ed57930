"""Table of the roles of a run's processes.

On the wire a role is its name. The table decides what `relaxd up` starts, what the launcher and the scaling calls
accept, which roles a run needs (`roles_for` of relaxd.board), and how the coordinator treats a replica.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from relaxd.config import RunConfig
from relaxd.engines import ENGINES, engines_of

COORDINATOR = "coordinator"
TRAINER = "trainer"
RANKS = "ranks"
ROLLOUT = "rollout"
REWARD = "reward"
ADVANTAGE = "advantage"
REFERENCE = "reference"
TEACHER = "teacher"
CRITIC = "critic"
JUDGE = "judge"
AGENT = "agent"


@dataclass(frozen=True, kw_only=True)
class Role:
    """Properties of a role of a run's processes, such as trainer or rollout."""

    name: str
    module: str
    """Python module that starts the role's service; nothing else in the library names these modules."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Module of the role's service for each engine that a run can choose; `module` serves all other engines."""
    engine: Callable[[RunConfig], str] = lambda config: ""
    """Returns the engine that holds the role's model in a run: a key of `modules`, or ""."""
    stage: str = ""
    """Stage of the board that the role works on, "" for none; a run needs the roles of all its stages."""
    on_stage: Callable[[RunConfig], bool] = lambda config: True
    """Returns False if another role works on this role's stage in a run with this configuration."""
    needed: Callable[[RunConfig], bool] = lambda config: False
    """Returns True if a run with this configuration needs the role although the role works on no stage."""
    replicas: int = 1
    """Number of replicas that `relaxd up` starts by default."""
    fewest: Callable[[RunConfig], int] = lambda config: 1
    """Returns the minimum number of replicas for a run that needs the role."""
    scalable: bool = True
    """True if replicas of the role may be added and removed while the stack runs."""
    most: int = 0
    """Maximum number of replicas of the role; 0: no limit."""
    model: Literal["", "policy", "reference", "teacher", "critic", "judge"] = ""
    """Kind of model that the role's replicas hold; "" for none."""
    weights: Literal["", "sends", "receives"] = ""
    """Part of the role in synchronisations: it sends or receives the policy's weights; "" for neither. A replica that
    receives weights takes no work before its first synchronisation."""
    gpus: Callable[[RunConfig], int] = lambda config: 0
    """Returns the number of GPUs that each replica leases in a run."""
    gpu_share: Callable[[RunConfig], float] = lambda config: 1.0
    """Returns the share of a GPU's memory, from 0 to 1, that a replica leases on each of its GPUs."""
    takes_turns: bool = False
    """True if replicas of the role take turns with other roles on the same GPUs in a colocated run."""
    always_busy: bool = False
    """True if the groups are held by a replica's child processes: the replica may progress although it holds none."""
    timeout_seconds: Callable[[RunConfig], float] = lambda config: 0.0
    """Returns the seconds without progress that the role's own timeouts permit; a replica counts as stuck only after
    more."""

    def works_on(self, stage: str, config: RunConfig) -> bool:
        """Return True if the role works on `stage` in a run with this configuration."""
        return bool(stage) and self.stage == stage and self.on_stage(config)

    def wrong_module(self, module: str, config: RunConfig) -> str:
        """Return why a replica started from `module` can't serve the run's engine for this role; "" if it can."""
        right = self.modules.get(self.engine(config), self.module)
        if module == right:
            return ""
        return (
            f'roles.{self.name}.engine is "{self.engine(config)}", but this replica is {module}: start {right} '
            f"(relaxd up --{self.name} 1 --{self.name}-engine {self.engine(config)})"
        )


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(name=COORDINATOR, module="services.coordinator", scalable=False),
        Role(
            name=TRAINER,
            module="services.trainer",
            stage="train",
            scalable=False,
            model="policy",
            weights="sends",
            gpus=lambda config: config.trainer.ranks_per_host,
            takes_turns=True,
            always_busy=True,
            timeout_seconds=lambda config: config.trainer.collective_timeout_seconds,
        ),
        Role(
            name=RANKS,
            module="services.trainer.ranks",
            needed=lambda config: config.trainer.hosts > 1,
            replicas=0,
            fewest=lambda config: config.trainer.hosts - 1,
            model="policy",
            gpus=lambda config: config.trainer.ranks_per_host,
        ),
        Role(
            name=ROLLOUT,
            module="services.rollout",
            stage="rollout",
            on_stage=lambda config: not config.agent.is_there,
            needed=lambda config: config.agent.is_there,  # agents ask its engine
            model="policy",
            weights="receives",
            gpus=lambda config: config.rollout.tensor_parallel if ENGINES[config.rollout.engine].leases_gpus else 0,
            gpu_share=lambda config: config.roles.engine_gpu_share,
            takes_turns=True,
            timeout_seconds=lambda config: config.weights.timeout_seconds + config.weights.connect_timeout_seconds,
        ),
        Role(
            name=REWARD,
            module="services.reward",
            stage="reward",
            timeout_seconds=lambda config: (
                config.reward.timeout_seconds + config.roles.judge.is_there * config.roles.judge.timeout_seconds
            ),
        ),
        Role(name=ADVANTAGE, module="services.advantage", stage="advantage"),
        Role(
            name=REFERENCE,
            module="services.trainer.reference",
            stage="reference",
            replicas=0,
            model="reference",
            gpus=lambda config: config.roles.reference.ranks,
            always_busy=True,
            timeout_seconds=lambda config: config.trainer.collective_timeout_seconds,
        ),
        Role(
            name=TEACHER,
            module="services.trainer.teacher",
            modules={
                engine: "services.trainer.teacher" if ENGINES[engine].in_ranks else "services.rollout.teacher"
                for engine in engines_of("roles.teacher")
            },
            engine=lambda config: config.roles.teacher.engine,
            stage="teacher",
            replicas=0,
            model="teacher",
            gpus=lambda config: config.roles.teacher.ranks,
            gpu_share=lambda config: config.roles.teacher.gpu_share,
            always_busy=True,
            timeout_seconds=lambda config: config.trainer.collective_timeout_seconds,
        ),
        Role(
            name=CRITIC,
            module="services.trainer.critic",
            stage="critic",
            replicas=0,
            most=1,  # it trains: two would be two models
            model="critic",
            gpus=lambda config: config.roles.critic.ranks,
            always_busy=True,
            timeout_seconds=lambda config: config.trainer.collective_timeout_seconds,
        ),
        Role(
            name=JUDGE,
            module="services.rollout.judge",
            needed=lambda config: config.roles.judge.has_replicas,
            replicas=0,
            model="judge",
            gpus=lambda config: (
                config.roles.judge.tensor_parallel if ENGINES[config.roles.judge.engine].leases_gpus else 0
            ),
            gpu_share=lambda config: config.roles.judge.gpu_share,
        ),
        Role(
            name=AGENT,
            module="services.agent",
            stage="rollout",
            on_stage=lambda config: config.agent.is_there,
            replicas=0,
            timeout_seconds=lambda config: (
                config.agent.call_seconds + config.weights.timeout_seconds + config.weights.connect_timeout_seconds
            ),
        ),
    )
}
"""All roles by name, in the order in which `relaxd up` starts them."""

REPLICA_ROLES = tuple(role for role in ROLES if role != COORDINATOR)
"""Names of the roles whose processes register with the coordinator: all others than the coordinator."""
SCALABLE_ROLES = tuple(role.name for role in ROLES.values() if role.scalable)
"""Names of the roles whose replicas can be added and removed while the stack runs."""


def unknown_role(role: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown role, with the most similar known role."""
    names = sorted(known)
    close = difflib.get_close_matches(role.lower().removeprefix("role_"), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"is {role!r}: it must be one of {', '.join(names)}{hint}"
