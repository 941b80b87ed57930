"""The report on a rehearsal's counters: speed, waits, sizes, and the first limit. Pure arithmetic.

Costs of the control plane are of two kinds. The cost of an idle run (heartbeats, looking for work) is measured while
the run is paused. The rest is a cost per step, which doesn't depend on the rehearsed speed. At the run's own speed the
total is idle cost + cost of a step / seconds of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from relaxd.roles import TRAINER
from relaxd.text import byte_amount
from relaxd.tools.rehearsal import capacity
from relaxd.tools.rehearsal.assumptions import Scale
from relaxd.tools.rehearsal.capacity import BUSY_MACHINE, CallTimes, HostLoad
from relaxd.tools.rehearsal.counters import MACHINE, EngineNumbers, Sample

NETWORK_BYTES = 1.25e9
"""Bytes per second of a network of 10 Gbit/s."""
CONTROL = ("coordinator", "redis", "reward", "advantage", "trainer", "rollout", "agent")
"""Roles whose processor time is reported, in this order."""
MANY_TIMES = 1000.0
"""Ratio of a resource's capacity to its use above which the report gives no exact number."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a rehearsal, not yet scaled to the real run."""

    scale: Scale
    first: Sample
    """Counters at the end of the step with which the measured window begins."""
    last: Sample
    """Counters at the end of the measured window's last step."""
    idle_first: Sample
    idle_last: Sample
    """Counters at the beginning and at the end of a window in which the run was paused."""
    cores: int
    """Number of processors of this machine."""
    waits: Mapping[str, int]
    peak_bytes: int
    step_bytes: float
    """Average size of a step file, in bytes."""
    step_file_seconds: float
    """Average seconds of writing a step file."""
    trainer_shares: Mapping[str, float]
    """Seconds of the trainer's steps, by what its thread did."""
    call_p99: float
    """99th percentile of the durations of the rehearsal's calls to the coordinator, in seconds."""
    dropped: Mapping[str, int]
    groups_per_step: int
    admitted_groups: int
    """Number of groups that the gate admits at once."""
    max_group_bytes: int
    """Maximum bytes of a group (board.max_group_bytes)."""
    worst_group_bytes: int
    """Size of a group with answers of maximal length in the real run, in bytes."""
    redis_bytes: int
    """Memory of the real run's Redis, in bytes."""
    call_times: CallTimes
    """99th percentiles of the durations of the replicas' calls to the coordinator."""
    least_step_seconds: float
    """Minimum seconds of a step, at the run's own speed."""
    engines: EngineNumbers
    """Number of rollout replicas, and the autoscaler's decisions."""

    @property
    def steps(self) -> int:
        """Number of steps in the measured window."""
        return self.last.step - self.first.step

    @property
    def wall_seconds(self) -> float:
        """Length of the measured window, in seconds."""
        return self.last.time - self.first.time

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, at the run's own speed."""
        return self.wall_seconds / self.steps * self.scale.time

    @property
    def machine_share(self) -> float:
        """Share of this machine's processors that was busy in the measured window."""
        return (self.last.cpu[MACHINE] - self.first.cpu[MACHINE]) / (self.cores * self.wall_seconds)

    @property
    def own_share(self) -> float:
        """Share of this machine's processors that the rehearsal used in the measured window."""
        spent = sum(value - self.first.cpu.get(role, 0.0) for role, value in self.last.cpu.items() if role != MACHINE)
        return spent / (self.cores * self.wall_seconds)

    @property
    def busy_at_rest(self) -> bool:
        """True if this machine had no idle processor while the run was paused."""
        core_seconds = self.cores * (self.idle_last.time - self.idle_first.time)
        return (self.idle_last.cpu[MACHINE] - self.idle_first.cpu[MACHINE]) / core_seconds > BUSY_MACHINE

    @property
    def load(self) -> HostLoad:
        """The rehearsal's processor load on this machine."""
        roles = [role for role in self.last.cpu if role != MACHINE]
        return HostLoad(
            cores=self.cores,
            machine_share=self.machine_share,
            idle_cores=sum(map(self.idle_cpu, roles)),
            step_seconds=sum(map(self.step_cpu, roles)),
            least_step_seconds=self.least_step_seconds,
            time_scale=self.scale.time,
            replicas=self.engines.last,
        )

    def idle_cpu(self, role: str) -> float:
        """Return the processors that a role keeps busy while the run is paused.

        0 for the trainer, which polls more often for the end of a pause than for groups.
        """
        if role == TRAINER:
            return 0.0
        seconds = self.idle_last.time - self.idle_first.time
        return (self.idle_last.cpu.get(role, 0.0) - self.idle_first.cpu.get(role, 0.0)) / seconds

    def step_cpu(self, role: str) -> float:
        """Return a role's processor seconds per step, without the cost of an idle run."""
        spent = self.last.cpu.get(role, 0.0) - self.first.cpu.get(role, 0.0)
        return max(0.0, spent - self.idle_cpu(role) * self.wall_seconds) / self.steps

    def cpu(self, role: str) -> float:
        """Return the number of processors that a role keeps busy at the run's own speed."""
        return self.idle_cpu(role) + self.step_cpu(role) / self.step_seconds

    @property
    def idle_operations(self) -> float:
        """Redis's commands per second while the run is paused."""
        seconds = self.idle_last.time - self.idle_first.time
        return (self.idle_last.operations - self.idle_first.operations) / seconds

    @property
    def step_operations(self) -> float:
        """Redis commands per step, without the commands of an idle run."""
        done = self.last.operations - self.first.operations
        return max(0.0, done - self.idle_operations * self.wall_seconds) / self.steps

    @property
    def operations(self) -> float:
        """Redis commands per second, at the run's own speed."""
        return self.idle_operations + self.step_operations / self.step_seconds

    @property
    def written(self) -> float:
        """Bytes that Redis receives per step in the real run."""
        return (self.last.written - self.first.written) / self.steps * self.scale.payload

    @property
    def read(self) -> float:
        """Bytes that Redis sends per step in the real run."""
        return (self.last.read - self.first.read) / self.steps * self.scale.payload


@dataclass(frozen=True)
class ResourceLimit:
    """Use and capacity of a resource, such as the processor of Redis's thread."""

    name: str
    used: float
    available: float
    unit: str
    advice: str
    """Change to make when the capacity doesn't suffice."""

    @property
    def factor(self) -> float:
        """Capacity of the resource, divided by its use."""
        return self.available / self.used if self.used > 0 else float("inf")


def limits(found: Measured) -> list[ResourceLimit]:
    """Return the limits of all resources, the nearest first. If all sizes double, so does the use of each resource."""
    engines = found.engines.mean(found.first.time, found.last.time)
    cores = [
        (
            "Redis's thread",
            found.cpu("redis"),
            "give Redis a faster processor; fewer, larger groups cost it fewer commands",
        ),
        (
            "the coordinator's process",
            found.cpu("coordinator"),
            "use fewer rollout replicas with more GPUs each (rollout.tensor_parallel): each costs heartbeats",
        ),
        (
            "host work of a trainer rank",
            found.cpu("trainer") / found.scale.ranks,
            "use more data-parallel ranks; rank 0 packs every group and writes the step file",
        ),
        (
            "the reward replica",
            found.cpu("reward"),
            "start more reward replicas (relaxd up --reward N), each with reward.workers processes",
        ),
        (
            "the advantage replica",
            found.cpu("advantage"),
            "start more advantage replicas (relaxd up --advantage N)",
        ),
        ("the host of a rollout replica", found.cpu("rollout") / engines, "use more rollout replicas"),
    ]
    if found.scale.agents:
        cores.append(("an agent replica", found.cpu("agent") / found.scale.agents, "use more agent replicas (--agent)"))
    rows = [ResourceLimit(name, used, 1.0, "cores", advice) for name, used, advice in cores]
    rows += [
        ResourceLimit(
            "a step's groups in Redis",
            found.written,
            found.redis_bytes,
            "bytes",
            "give Redis more memory, or make steps smaller (trainer.groups_per_step, rollout.max_new_tokens)",
        ),
        ResourceLimit(
            "a group's answers",
            found.worst_group_bytes,
            found.max_group_bytes,
            "bytes",
            "raise board.max_group_bytes (up to 16 GiB), or lower rollout.samples_per_prompt or max_new_tokens",
        ),
        ResourceLimit(
            "Redis's network (10 Gbit/s)",
            (found.written + found.read) / found.step_seconds,
            NETWORK_BYTES,
            "bytes/s",
            "give Redis a faster network; rollout.return_routed_experts is the largest column if it is set",
        ),
        ResourceLimit(
            "writing the step file",
            found.step_file_seconds * found.scale.payload,
            found.step_seconds,
            "s a step",
            "put run.folder on a faster disk, or make steps smaller",
        ),
    ]
    beats = found.call_times.heartbeat_at_rest
    if beats is not None and not found.busy_at_rest:  # else heartbeats waited for this machine
        name, goal = "the coordinator's answers (p99 of Heartbeat)", capacity.HEARTBEAT_SECONDS
        rows.append(ResourceLimit(name, beats, goal, "s", "use fewer rollout replicas"))
    return sorted(rows, key=lambda limit: limit.factor)


def verdict(found: Measured) -> str:
    """Say whether the run would fill its steps with groups: seconds per step, and the dropped groups."""
    dropped = sum(found.dropped.values())
    trained = found.last.step * found.groups_per_step
    share = dropped / max(1, dropped + trained)
    losing = f"; {share:.0%} of the groups were dropped ({_listed(found.dropped)})" if share > 0.05 else ""
    return f"yes: a step every {found.step_seconds:.3g} s{losing}"


def first_limit(found: Measured) -> str:
    """Describe the resource that would be exhausted first if all sizes doubled, and what to change."""
    nearest = limits(found)[0]
    use = f"{nearest.name}: {amount(nearest.used, nearest.unit)} of {amount(nearest.available, nearest.unit)}"
    if nearest.factor < 1:
        return f"met already: {use}. {_sentence(nearest.advice)}"
    if nearest.factor < 2:
        return f"met when sizes double (at {nearest.factor:.3g} x): {use}. {_sentence(nearest.advice)}"
    return f"none when sizes double; the nearest, at {nearest.factor:.3g} x, is {use}. {_sentence(nearest.advice)}"


def rows(found: Measured) -> list[tuple[str, str]]:
    """Return the report's rows, each a name and a value. There is no verdict if this machine was too slow."""
    refused = capacity.refusal(found.load)
    result = [("no verdict", refused + ".")] if refused else _verdicts(found)
    result += _costs(found)
    judged = capacity.verdict(
        found.call_times,
        found.cpu("coordinator"),
        found.engines.last,
        busy_at_rest=found.busy_at_rest,
    )
    result += [
        ("replicas' calls", capacity.calls_row(found.call_times, found.scale.time)),
        ("the control plane", judged),
    ]
    if refused:
        return result
    result += [
        ("first limit", first_limit(found)),
        ("next limits", "; ".join(f"{one.name} at {_times(one.factor)}" for one in limits(found)[1:4])),
    ]
    if doubt := capacity.doubt(found.load, found.own_share):
        result.append(("doubtful", doubt))
    return result


def _verdicts(found: Measured) -> list[tuple[str, str]]:
    """Return the report's rows that depend on the seconds of steps."""
    result = [
        ("would it fill steps?", verdict(found)),
        ("the open step waits for", _shares(found.waits)),
        ("the trainer's time", _shares(found.trainer_shares)),
    ]
    if found.engines.mode != "off":
        name = f"the autoscaler ({found.engines.mode})"
        result.append((name, found.engines.row(found.first.time, found.last.time)))
    if found.admitted_groups < (most := found.engines.most):
        idle = (
            f"{most - found.admitted_groups} of {most} rollout replicas never have work: "
            f"the gate admits {found.admitted_groups} groups, and each is generated by one replica. Raise "
            "trainer.groups_per_step, board.max_staleness or board.oversample, or start fewer replicas."
        )
        result.insert(1, ("idle replicas", idle))
    return result


def _costs(found: Measured) -> list[tuple[str, str]]:
    """Return the report's rows on what a step costs: Redis, disk, and processors."""
    scale = found.scale
    result = [
        ("Redis, memory at most", amount(found.peak_bytes * scale.payload, "bytes")),
        (
            "Redis, a step",
            f"{found.step_operations:,.0f} commands, {amount(found.written, 'bytes')} in, "
            f"{amount(found.read, 'bytes')} out",
        ),
        ("Redis, commands", f"{found.operations:,.0f}/s, of which idle {found.idle_operations:,.0f}/s"),
        ("disk, a step", amount(found.step_bytes * scale.payload, "bytes")),
    ]
    for role in CONTROL[: None if scale.agents else -1]:
        result.append(
            (
                f"processor, {role}",
                f"{found.step_cpu(role):.3g} s a step + {found.idle_cpu(role):.2g} cores = {found.cpu(role):.2g} cores",
            )
        )
    return [*result, ("coordinator, a call", f"p99 {found.call_p99 * 1e3:.3g} ms")]


def amount(value: float, unit: str) -> str:
    """Format an amount with its unit; bytes get a prefix such as "MiB"."""
    if not unit.startswith("bytes"):
        return f"{value:.3g} {unit}"
    return byte_amount(value) + unit.removeprefix("bytes")


def _times(factor: float) -> str:
    return f"{factor:.3g} x" if factor < MANY_TIMES else f"more than {MANY_TIMES:.0f} x"


def _shares(parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value / total:.0%}" for name, value in ordered if value >= 0.005 * total) or "nothing"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _sentence(advice: str) -> str:
    return advice[:1].upper() + advice[1:] + "."
