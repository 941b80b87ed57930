"""Counters of a rehearsal: rollout replicas, processor time by role, Redis, step files, and the run's waits."""

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.local.state_folder import StateFolder
from relaxd.rpc.message_parts import words
from relaxd.run_folder import step_files
from relaxd.v1.coordinator_pb2 import WAIT_KIND_STAGE, Run, WaitKind
from relaxd.v1.scaling_pb2 import Autoscaler

SHOWN = 10
"""Maximum number of autoscaler decisions, and of changes of the replica count, that the report lists."""


@dataclass
class EngineNumbers:
    """Changes of the number of rollout replicas, and decisions of the autoscaler. Times are monotonic, in seconds."""

    changes: list[tuple[float, int]]
    """Pairs of a time and the number of replicas from then on; the first pair is the start of the run."""
    mode: str = "off"
    """Value of autoscale.mode in the run; with "off", the number of replicas never changes."""
    decisions: list[tuple[float, str]] = field(default_factory=list)
    """Decisions of the autoscaler, as pairs of time and text."""

    @property
    def last(self) -> int:
        """Number of rollout replicas at the end of the run."""
        return self.changes[-1][1]

    @property
    def most(self) -> int:
        """Maximum number of rollout replicas."""
        return max(number for _, number in self.changes)

    def observe(self, time: float, found: Autoscaler) -> None:
        """Record the autoscaler's replica count and its new decisions, observed at `time`. Times never decrease."""
        if found.replicas != self.last:
            self.changes.append((time, found.replicas))
        new = max(0, len(found.decisions) - len(self.decisions))
        for one in reversed(found.decisions[:new]):
            text = f"{one.replicas} to {one.wanted_replicas}{'' if one.request_id else ' (not done)'}: {one.reason}"
            self.decisions.append((time, text))

    def mean(self, begin: float, end: float) -> float:
        """Return the mean number of replicas from `begin` to a later `end`."""
        return sum(number * seconds for number, seconds in self._spans(begin, end)) / (end - begin)

    def row(self, begin: float, end: float) -> str:
        """Format the numbers of replicas between two times, and the decisions until `end`, for the report.

        The number at rest, for which the control plane is judged, is appended if it differs.
        Times of decisions are in seconds since the start of the run, as in progress lines.
        """
        spans = [(number, seconds) for number, seconds in self._spans(begin, end) if seconds >= 0.5]
        numbers = [f"{number} for {seconds:.0f} s" for number, seconds in spans]
        if spans and spans[-1][0] != self.last:
            numbers.append(f"{self.last} at rest")
        decided = [f"at {time - self.changes[0][0]:.0f} s {text}" for time, text in self.decisions if time <= end]
        return f"{_shown(numbers, ', ')}. Decisions: {_shown(decided, '; ') or 'none'}"

    def _spans(self, begin: float, end: float) -> list[tuple[int, float]]:
        """Return pairs (number of replicas, seconds), one for each span between two times in which the number was
        constant."""
        ends = [*(time for time, _ in self.changes[1:]), end]
        cut = (
            (number, min(until, end) - max(since, begin))
            for (since, number), until in zip(self.changes, ends, strict=True)
        )
        return [(number, seconds) for number, seconds in cut if seconds > 0]


def _shown(parts: list[str], separator: str) -> str:
    more = f"{len(parts) - SHOWN} earlier ones{separator}" if len(parts) > SHOWN else ""
    return more + separator.join(parts[-SHOWN:])


MACHINE = "machine"
"""Key of the processor time of all processes on this machine; the other keys are roles."""


@dataclass(frozen=True)
class Sample:
    """All counters of a rehearsal at one moment. They never decrease."""

    time: float
    """Time of reading the counters, in seconds of the monotonic clock."""
    step: int
    """Number of committed steps."""
    cpu: Mapping[str, float]
    """Processor seconds by role, child processes included; the key `MACHINE` has those of the whole machine."""
    operations: int
    """Number of commands that Redis has executed."""
    written: int
    """Bytes that Redis has received."""
    read: int
    """Bytes that Redis has sent."""


@dataclass
class Counters:
    """Reads the counters of a rehearsal in progress. Call `sample` several times a second."""

    folder: StateFolder
    """State folder of the rehearsal's services."""
    redis: "redis.Redis"
    """Client of the rehearsal's Redis."""
    coordinator: CoordinatorClient
    run_folder: Path
    run_id: str
    engines: EngineNumbers
    """Tracks the number of rollout replicas and the autoscaler's decisions."""
    waits: Counter[str] = field(default_factory=Counter)
    """Number of `sample` calls that found the open step waiting, by what the step waited for."""
    call_seconds: list[float] = field(default_factory=list)
    """Durations of this process's calls to the coordinator, in seconds."""
    peak_bytes: int = 0
    """Maximum memory that Redis used, in bytes."""
    step_bytes: dict[int, int] = field(default_factory=dict)
    """Size of each step's file, in bytes, by step."""
    run: Run = field(default_factory=Run)
    """The run's last known state."""
    _spent: dict[tuple[str, int], float] = field(default_factory=dict)
    """Processor seconds by role and process, also of processes that have ended."""

    def sample(self) -> Sample:
        """Read all counters. Files of committed steps are then deleted, because nothing will replay them."""
        began = time.monotonic()
        self.run = self.coordinator.run(self.run_id)
        self.call_seconds.append(time.monotonic() - began)
        if wait := current_wait(self.run):
            self.waits[wait] += 1
        if self.engines.mode != "off" and self.run.state not in ENDED:
            self.engines.observe(time.monotonic(), self.coordinator.autoscaler(self.run_id))
        info = self.redis.info()
        assert isinstance(info, dict)
        self.peak_bytes = max(self.peak_bytes, int(info["used_memory"]))
        self._count_step_files()
        return Sample(
            time.monotonic(),
            self.run.step,
            self.processor_times(),
            int(info["total_commands_processed"]),
            int(info["total_net_input_bytes"]),
            int(info["total_net_output_bytes"]),
        )

    def _count_step_files(self) -> None:
        for step, path in step_files(self.run_folder).items():
            self.step_bytes[step] = path.stat().st_size
            if step <= self.run.step:
                path.unlink()

    def processor_times(self) -> dict[str, float]:
        """Return the processor seconds by role, including removed services, and those of the whole machine under
        `MACHINE`."""
        state = self.folder.read()
        times = psutil.cpu_times()
        used = {MACHINE: sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)}
        for service in state.services if state else ():
            if service.pid is None:
                continue
            with suppress(psutil.Error):  # it has just ended
                self._spent[service.role, service.pid] = processor_seconds(service.pid)
        for (role, _), seconds in self._spent.items():
            used[role] = used.get(role, 0.0) + seconds
        return used


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its children, including ended children, so that it only grows.

    Raises psutil.Error: there is no such process.
    """
    process = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:4]) for one in (process, *process.children(recursive=True)))


def busy_share(before: Sample, after: Sample) -> float:
    """Return the busy share of this machine's processors between two readings of the counters; 0 if no time passed."""
    core_seconds = (psutil.cpu_count() or 1) * (after.time - before.time)
    return (after.cpu[MACHINE] - before.cpu[MACHINE]) / core_seconds if core_seconds > 0 else 0.0


def current_wait(run: Run) -> str:
    """Return the open step's wait in readable form: its kind, and the stage if any; "" without a wait."""
    kind = words(WaitKind)[run.wait.current_kind]
    return f"{kind} {run.wait.current_on}" if run.wait.current_kind == WAIT_KIND_STAGE else kind
