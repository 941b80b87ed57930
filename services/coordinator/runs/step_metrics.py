"""Engine and GPU utilisation per step, from heartbeats."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.coordinator.fleet.registry import Replica

BUSY, PAUSED = 1.0, 2.0
"""Values of the gauge engine_state."""
MOST_IN_LINE = 32
"""Maximum number of replicas with separate values in a step's line. More would hardly be read, and hundreds would add
tens of kilobytes to each line."""


@dataclass(frozen=True)
class StepUsage:
    """Shares of the time since the last step."""

    metrics: dict[str, float]
    """Means over replicas, by metric; unreported metrics are missing."""
    replicas: dict[str, dict[str, float]]
    """The share of each replica, by metric and replica id."""

    @property
    def line(self) -> dict[str, float | dict[str, dict[str, float]]]:
        """Entries for a step's line in metrics.jsonl: `replicas` apart if there are several, and not too many."""
        shown = {name: shares for name, shares in self.replicas.items() if 1 < len(shares) <= MOST_IN_LINE}
        return {**self.metrics, **({"replicas": shown} if shown else {})}


@dataclass
class _Counter:
    """A sampled counter that grows by at most one second per second."""

    counted: float
    """The part that was attributed to steps."""

    def take(self, value: float, limit: float) -> float:
        """Return the growth since the last call, at most `limit`; the rest stays for the next call."""
        grown = min(max(0.0, value - self.counted), limit)
        self.counted += grown
        return grown


@dataclass
class _ReplicaUsage:
    """Utilisation of one replica since the last step."""

    since: float
    """Clock time up to which usage was attributed to steps."""
    busy: _Counter | None
    paused: _Counter | None
    gpu_busy: float = 0.0
    """Seconds since then in which a kernel ran."""
    gpu_seconds: float = 0.0
    sampled_at: float = 0.0
    prompts: tuple[float, float] = (0.0, 0.0)
    """Tokens of samples' prompts up to the last step, and those that the engine read."""


class Usage:
    """Adds up engine and GPU time between steps.

    Heartbeats come about once a second. An engine is assumed to continue what its last heartbeat reported; the next
    step corrects the error. So the numbers of one short step are rough, but the sums are right.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, float], _ReplicaUsage] = {}

    def sample(self, replicas: Sequence[Replica]) -> None:
        """Sample the replicas; call it several times a second. A new replica is counted from its first sample."""
        now = self._clock()
        seen = {}
        for replica in replicas:
            key = (replica.replica_id, replica.registered_at)
            known = self._seen.get(key)
            if known is None:
                busy, paused = _engine_seconds(replica, now)
                known = _ReplicaUsage(
                    now, _counter(busy), _counter(paused), sampled_at=now, prompts=_prompt_tokens(replica)
                )
            utilisation = replica.status.gauges.get("gpu_utilisation")
            if utilisation is not None:
                known.gpu_busy += utilisation * (now - known.sampled_at)
                known.gpu_seconds += now - known.sampled_at
            known.sampled_at = now
            seen[key] = known
        self._seen = seen

    def take(self, replicas: Sequence[Replica]) -> StepUsage:
        """Return the shares since the last call."""
        self.sample(replicas)
        now = self._clock()
        shares: dict[str, dict[str, float]] = {"busy": {}, "paused": {}, "idle": {}}
        gpus: dict[str, float] = {}
        prompted = prefilled = 0.0
        for replica in replicas:
            known = self._seen[(replica.replica_id, replica.registered_at)]
            seconds = now - known.since
            if seconds <= 0:
                continue
            busy, paused = _engine_seconds(replica, now)
            if busy is not None and paused is not None:
                if known.busy is None or known.paused is None:  # its first heartbeat came after the last step
                    known.busy, known.paused = _counter(busy), _counter(paused)
                else:
                    shares["paused"][replica.replica_id] = known.paused.take(paused, seconds) / seconds
                    left = seconds * (1 - shares["paused"][replica.replica_id])
                    shares["busy"][replica.replica_id] = known.busy.take(busy, left) / seconds
                    idle = 1 - shares["paused"][replica.replica_id] - shares["busy"][replica.replica_id]
                    shares["idle"][replica.replica_id] = max(0.0, idle)
            before, known.prompts = known.prompts, _prompt_tokens(replica)
            if known.prompts[0] > before[0]:
                prompted += known.prompts[0] - before[0]
                prefilled += known.prompts[1] - before[1]
            if known.gpu_seconds > 0:
                gpus[replica.replica_id] = 1 - min(1.0, known.gpu_busy / known.gpu_seconds)
            known.since, known.gpu_busy, known.gpu_seconds = now, 0.0, 0.0
        result = {f"engine_{name}_share": _mean(values) for name, values in shares.items() if values}
        if prompted:
            result["engine_prefix_hit_share"] = min(1.0, max(0.0, 1 - prefilled / prompted))
        single = {"engine_idle_share": shares["idle"]} if shares["idle"] else {}
        if gpus:
            count = {replica.replica_id: max(1, len(replica.status.gpu_uuids)) for replica in replicas}
            total = sum(count[replica] for replica in gpus)
            result["gpu_idle_share"] = sum(value * count[replica] for replica, value in gpus.items()) / total
            single["gpu_idle_share"] = gpus
        return StepUsage(result, single)


def speed_per_gpu(metrics: Mapping[str, float], replicas: Sequence[Replica]) -> dict[str, float]:
    """Return a step's tokens per second for each GPU of these replicas; empty without GPUs."""
    gpus = {uuid for replica in replicas for uuid in replica.status.gpu_uuids}  # colocated replicas share some
    if not gpus or "tokens_per_second" not in metrics:
        return {}
    return {"tokens_per_second_per_gpu": metrics["tokens_per_second"] / len(gpus)}


def _engine_seconds(replica: Replica, now: float) -> tuple[float | None, float | None]:
    """Return an engine's busy and paused seconds so far; None if its replica reports none."""
    gauges = replica.status.gauges
    if "engine_state" not in gauges:
        return None, None
    state, passed = gauges["engine_state"], max(0.0, now - replica.seen)
    return (
        gauges["engine_busy_seconds"] + (passed if state == BUSY else 0.0),
        gauges["engine_paused_seconds"] + (passed if state == PAUSED else 0.0),
    )


def _prompt_tokens(replica: Replica) -> tuple[float, float]:
    """Return tokens of samples' prompts so far, and those that the engine read; zeros if it doesn't count them."""
    gauges = replica.status.gauges
    return gauges.get("engine_prompted_tokens", 0.0), gauges.get("engine_prefilled_tokens", 0.0)


def _counter(value: float | None) -> _Counter | None:
    return None if value is None else _Counter(value)


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)
