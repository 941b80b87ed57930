"""A run's replicas under the real health policy and registry, by a clock of the test's own."""

from dataclasses import dataclass, field
from typing import Any

from relaxd.config import DataConfig, HealthConfig, ModelConfig, RewardConfig, RunConfig, RunSection, WeightsConfig
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_FAILED,
    REPLICA_STATE_IDLE,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    ReplicaStatus,
    WeightVersion,
)
from services.coordinator.fleet.registry import Registry
from services.coordinator.fleet.run_fleet import Fleet
from services.coordinator.health.detection import HealthSignals
from services.coordinator.health.policy import HealthPolicy, HealthUpdate, RestartMode, RoleSigns
from services.coordinator.state.records import Event, Health, HealthRecord
from services.coordinator.state.store import AsyncStore, Store

RUN = "run"
ROLES = ("trainer", "rollout", "reward", "advantage")
LEASE_SECONDS, HEARTBEAT_SECONDS, TICK_SECONDS = 3.0, 1.0, 0.5
START_SECONDS = 2.0
"""Time from a restart to the registration of the next process."""
ATTEMPT_SECONDS, LIFE_SECONDS = 15.0, 3.0
"""Time between two starts of a run that "fails", and from one that "dies" to its end."""


@dataclass
class Process:
    """One process: it "works", is "stuck", answers "wrong" or is "frozen"; "gone" is one that never registers.

    One that "fails" tries again and again to start the run, as does one that "refuses" to, because the settings are
    wrong; one that "dies" ends soon after it was ready, without work
    done, and one that "works and dies" with work done. The next one is started by their supervisor.
    """

    replica_id: str
    does: str
    began: float
    """Time since which it has a part in the run."""
    progress: int = 0


@dataclass
class Instance:
    """A place of which a supervisor starts one process after the other."""

    name: str
    role: str
    plan: list[str]
    """What its next processes do; the last one of all is repeated."""
    supervised: bool = True
    process: Process | None = None
    starts_at: float | None = None
    count: int = 0


@dataclass(frozen=True)
class Restart:
    """A restart that was ordered."""

    at: float
    instance: str
    mode: RestartMode


@dataclass
class World:
    """`passes` lets time pass, in ticks of the health manager; restarts that are ordered happen."""

    redis_url: str
    health: dict[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ROLES
    supervisor_seconds: float = 1.0
    """Time from the end of a process that "dies" to the registration of the next."""
    now: float = 1e9
    step: int = 3
    record: HealthRecord = field(default_factory=HealthRecord)
    instances: dict[str, Instance] = field(default_factory=dict)
    restarts: list[Restart] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Ids whose groups were reclaimed."""
    launcher_errors: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = Store(self.redis_url)
        self.config = RunConfig(
            run=RunSection(steps=1),
            model=ModelConfig(path="model"),
            data=DataConfig(source="addition"),
            reward=RewardConfig(name="addition"),
            weights=WeightsConfig(timeout_seconds=1.0, connect_timeout_seconds=1.0),
            health=HealthConfig(**self.health),
        )
        self.coordinator()

    def coordinator(self) -> None:
        """Begin as a coordinator that has only what is in Redis."""
        self.store.take_over()
        self.registry = Registry(
            AsyncStore(self.store),
            lease_seconds=LEASE_SECONDS,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            gpu_lease_seconds=LEASE_SECONDS,
            clock=self.clock,
        )
        self.registry.load(self.store.replicas(), {})
        self.fleet = Fleet(self.registry, RUN, self.roles, self.clock)
        self.policy = HealthPolicy(
            RUN,
            self.config,
            HealthSignals(self.config, HEARTBEAT_SECONDS, sync_failures=self._sync_failures, clock=self.clock),
            roles=self.roles,
            restart_failures=self.launcher_errors,
            idle_reason=self.fleet.idle_reason,
            clock=self.clock,
        )
        self.record = HealthRecord.model_validate_json(self.record.model_dump_json()).with_reset_timers(self.now)
        self.fleet.give_up(self.record.given_up)

    def clock(self) -> float:
        return self.now

    async def add(self, name: str, *plan: str, supervised: bool = True) -> Instance:
        """Start an instance, whose role is the name's first word, and its first process."""
        role = name.split("-")[0]
        self.instances[name] = instance = Instance(name, role, list(plan) or ["works"], supervised)
        await self._start(instance)
        return instance

    def die(self, name: str, next_after: float | None = None) -> None:
        """End an instance's process; its supervisor starts the next one after this many seconds (None: never)."""
        instance = self.instances[name]
        instance.process = None
        instance.starts_at = None if next_after is None else self.now + next_after

    async def passes(self, seconds: float) -> None:
        """Let this time pass."""
        end = self.now + seconds
        while self.now < end:
            await self._tick()

    async def until(self, state: Health, subject: str, seconds: float = 300.0) -> Event:
        """Let time pass until an event of an instance or, by its name, of a role; return it."""
        end = self.now + seconds
        while not (found := [event for event in self.events(subject) if event.state == state]):
            assert self.now < end, f"no {state} of {subject} within {seconds:g} s: {self.record.events}"
            await self._tick()
        return found[0]

    def events(self, subject: str) -> list[Event]:
        """The events of an instance or, by its name, of a role."""
        return [event for event in self.record.events if subject == (event.instance or event.role)]

    def working(self, role: str) -> list[str]:
        """The ids of the replicas of a role that have a part in the run."""
        return [one.replica_id for one in self.registry.of_role(role, RUN)]

    async def _tick(self) -> None:
        self.now += TICK_SECONDS
        for instance in self.instances.values():
            if instance.starts_at is not None and self.now >= instance.starts_at:
                await self._start(instance)
            if instance.process is not None:
                self._heartbeat(instance, instance.process)
        await self.registry.expire()
        draft = HealthUpdate(self.record, self.now)
        self.policy.update(draft, self.registry.all(), RoleSigns(self.fleet.missing(), self.step))
        self.record = HealthRecord.model_validate_json(draft.result().model_dump_json())
        self.fleet.give_up(self.record.given_up)
        self.lost += draft.lost_ids
        for order in draft.restarts:
            self.restarts.append(Restart(self.now, order.instance, order.mode))
            instance = self.instances[order.instance]
            if order.mode != RestartMode.PROBE or instance.process is not None:  # a dead one is up to its supervisor
                instance.starts_at = self.now + START_SECONDS

    async def _start(self, instance: Instance) -> None:
        does = instance.plan.pop(0) if len(instance.plan) > 1 else instance.plan[0]
        instance.starts_at, instance.process = None, None
        if does == "gone":
            return
        replica_id = f"{instance.name}-r{instance.count}" if instance.count else instance.name
        instance.count += 1
        instance.process = Process(replica_id, does, self.now)
        await self.registry.register(
            Registration(
                replica_id=replica_id,
                role=instance.role,
                address="127.0.0.1:9",
                instance=instance.name if instance.supervised else "",
            )
        )

    def _heartbeat(self, instance: Instance, process: Process) -> None:
        if process.does == "frozen":
            return
        if self.fleet.idle_reason(process.replica_id):
            process.began = self.now
            self.registry.heartbeat(process.replica_id, ReplicaStatus(state=REPLICA_STATE_IDLE))
            return
        age, state, detail = self.now - process.began, REPLICA_STATE_READY, ""
        if process.does in ("fails", "refuses"):
            attempt, seconds = divmod(age, ATTEMPT_SECONDS)
            state = REPLICA_STATE_FAILED if seconds > START_SECONDS else REPLICA_STATE_STARTING
            detail = f"its checkpoint doesn't fit (attempt {attempt + 1:.0f})" if state == REPLICA_STATE_FAILED else ""
        elif process.does.endswith("dies") and age > LIFE_SECONDS:
            state, detail = REPLICA_STATE_FAILED, "the file of step 4 isn't there"
            self.die(instance.name, next_after=self.supervisor_seconds)
        process.progress += process.does.startswith("works")
        status = ReplicaStatus(
            state=state,
            detail=detail,
            start_refused=process.does == "refuses" and state == REPLICA_STATE_FAILED,
            run_id=RUN,
            held_groups=2,
            progress=process.progress,
            done_groups=process.progress,
            weights=WeightVersion(term=1, version=3),
        )
        self.registry.heartbeat(process.replica_id, status)

    def _sync_failures(self, replica: Any) -> int:
        found = (one.process for one in self.instances.values() if one.process is not None)
        return 4 * any(one.replica_id == replica.replica_id and one.does == "wrong" for one in found)
