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
    """Properties of one role."""

    name: str
    module: str
    """Module of the role's service. Nothing else in the library names the services' modules."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Modules of the role's service by `engine`, if a run can choose the engine; `module` is the default."""
    engine: Callable[[RunConfig], str] = lambda config: ""
    """Engine that holds the model in a run: a key of `modules`."""
    stage: str = ""
    """Stage of the board that the role works on; a run needs the roles of its stages. Empty: none."""
    on_stage: Callable[[RunConfig], bool] = lambda config: True
    """False if another role works on its stage in a run."""
    needed: Callable[[RunConfig], bool] = lambda config: False
    """True if a run needs this role although it doesn't work on a stage."""
    replicas: int = 1
    """Replicas that `relaxd up` starts by default."""
    fewest: Callable[[RunConfig], int] = lambda config: 1
    """Minimum number of replicas for a run that needs the role."""
    scalable: bool = True
    """True if replicas may be added and removed."""
    most: int = 0
    """Maximum number of replicas; 0: no limit."""
    model: Literal["", "policy", "reference", "teacher", "critic", "judge"] = ""
    """The model that the role holds."""
    weights: Literal["", "sends", "receives"] = ""
    """Part of the role in weight synchronisations. A role that receives weights works only once it has some."""
    gpus: Callable[[RunConfig], int] = lambda config: 0
    """GPUs that a replica leases for a run."""
    gpu_share: Callable[[RunConfig], float] = lambda config: 1.0
    """Share of each of these GPUs' memory that the role leases."""
    takes_turns: bool = False
    """True if the role shares its GPUs with other roles that take turns, in a colocated run."""
    always_busy: bool = False
    """True if the role's children take the groups, so that its progress continues while it holds none."""
    timeout_seconds: Callable[[RunConfig], float] = lambda config: 0.0
    """Maximum seconds without progress that the role's own timeouts allow; only after them it counts as stuck."""

    def works_on(self, stage: str, config: RunConfig) -> bool:
        """Return True if the role works on a stage in a run."""
        return bool(stage) and self.stage == stage and self.on_stage(config)

    def wrong_module(self, module: str, config: RunConfig) -> str:
        """Return the reason why a module's service can't hold this role's model in a run; "" if it can."""
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
"""Roles whose processes register with the coordinator."""
SCALABLE_ROLES = tuple(role.name for role in ROLES.values() if role.scalable)
"""Roles whose replicas can be added and removed."""


def unknown_role(role: str, known: Iterable[str]) -> str:
    """Return the error for an unknown role, with the most similar known one."""
    names = sorted(known)
    close = difflib.get_close_matches(role.lower().removeprefix("role_"), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"is {role!r}: it must be one of {', '.join(names)}{hint}"
