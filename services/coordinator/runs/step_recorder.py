"""Recording of the board in the run's folder: committed steps, closed groups and samples, with the metrics that the
coordinator measures for each step: use of engines and GPUs, and pass rates.

Pass rates are over all groups that were scored, dropped ones included. A curriculum or zero-variance filter drops what
the model always or never solves, so pass@k of the trained groups alone would be wrong. A dropped group counts for the
step that was committed next.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from relaxd import telemetry
from relaxd.data.curriculum.run_curriculum import Curriculum
from relaxd.evaluation.estimates import pass_at_k
from relaxd.run_folder import GROUPS, newest_lines
from relaxd.waiting import waiting
from services.coordinator.fleet.registry import Replica
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.runs.run_files import RunFiles
from services.coordinator.state.records import Evaluation
from services.coordinator.state.retries import FolderRetry, RedisRetry

BUSY, PAUSED = 1.0, 2.0
"""Values of the gauge engine_state: BUSY while the engine generates, PAUSED while it is paused."""
MOST_IN_LINE = 32
"""Maximum number of replicas with separate values in a step's line. More would hardly be read, and hundreds would add
tens of kilobytes to each line."""


@dataclass(frozen=True)
class StepUsage:
    """Shares of the time since the last step in which engines were busy, paused or idle and GPUs were idle."""

    metrics: dict[str, float]
    """Means over replicas, by metric; a metric that no replica reported is missing."""
    replicas: dict[str, dict[str, float]]
    """Shares of the individual replicas, by metric and replica id."""

    @property
    def line(self) -> dict[str, float | dict[str, dict[str, float]]]:
        """Entries for a step's line in metrics.jsonl; `replicas` is included only for 2 to MOST_IN_LINE replicas."""
        shown = {name: shares for name, shares in self.replicas.items() if 1 < len(shares) <= MOST_IN_LINE}
        return {**self.metrics, **({"replicas": shown} if shown else {})}


@dataclass
class _Counter:
    """A counter of seconds that is read repeatedly. It can't grow faster than the clock."""

    counted: float
    """Counter value, in seconds, up to which growth was already attributed to earlier steps."""

    def take(self, value: float, limit: float) -> float:
        """Return the seconds counted since the last call, at most `limit`; the rest stays for the next call."""
        grown = min(max(0.0, value - self.counted), limit)
        self.counted += grown
        return grown


@dataclass
class _ReplicaUsage:
    """Utilisation of one replica since the last step."""

    since: float
    """Clock time in seconds up to which the replica's usage was already attributed to steps."""
    engine: tuple[_Counter, _Counter] | None
    """Counters of the engine's busy and paused seconds; None before the replica reports them."""
    gpu_busy: float = 0.0
    """Seconds after `since` in which a GPU kernel ran."""
    gpu_seconds: float = 0.0
    sampled_at: float = 0.0
    prompts: tuple[float, float] = (0.0, 0.0)
    """Prompt tokens of all samples up to the last step, and how many of them the engine prefilled."""


class Usage:
    """Adds up engine and GPU time between steps.

    Heartbeats come about once a second. An engine is assumed to continue what its last heartbeat reported; the next
    step corrects the error. So the numbers of one short step are rough, but the sums are right.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, float], _ReplicaUsage] = {}

    def sample(self, replicas: Sequence[Replica]) -> None:
        """Add the replicas' usage since the last sample to their sums; call it several times a second. A new replica is
        counted from its first sample."""
        now = self._clock()
        seen = {}
        for replica in replicas:
            key = (replica.replica_id, replica.registered_at)
            known = self._seen.get(key)
            if known is None:
                counters = _counters(_engine_seconds(replica, now))
                known = _ReplicaUsage(now, counters, sampled_at=now, prompts=_prompt_tokens(replica))
            utilisation = replica.status.gauges.get("gpu_utilisation")
            if utilisation is not None:
                known.gpu_busy += utilisation * (now - known.sampled_at)
                known.gpu_seconds += now - known.sampled_at
            known.sampled_at = now
            seen[key] = known
        self._seen = seen

    def take(self, replicas: Sequence[Replica]) -> StepUsage:
        """Return the shares of time that engines were busy, paused and idle and that GPUs were idle, since the last
        call."""
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
            engine_seconds = _engine_seconds(replica, now)
            if known.engine is None:  # its first heartbeat came after the last step, or is yet to come
                known.engine = _counters(engine_seconds)
            elif engine_seconds is not None:
                (busy, paused), (busy_counter, paused_counter) = engine_seconds, known.engine
                paused_share = paused_counter.take(paused, seconds) / seconds
                busy_share = busy_counter.take(busy, seconds * (1 - paused_share)) / seconds
                of_engine = {
                    "busy": busy_share,
                    "paused": paused_share,
                    "idle": max(0.0, 1 - paused_share - busy_share),
                }
                for name, share in of_engine.items():
                    shares[name][replica.replica_id] = share
            before, known.prompts = known.prompts, _prompt_tokens(replica)
            if known.prompts[0] > before[0]:
                prompted += known.prompts[0] - before[0]
                prefilled += known.prompts[1] - before[1]
            if known.gpu_seconds > 0:
                gpus[replica.replica_id] = 1 - min(1.0, known.gpu_busy / known.gpu_seconds)
            known.since, known.gpu_busy, known.gpu_seconds = now, 0.0, 0.0
        result = {f"engine_{name}_share": fmean(values.values()) for name, values in shares.items() if values}
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


def _engine_seconds(replica: Replica, now: float) -> tuple[float, float] | None:
    """Return the busy and the paused seconds of a replica's engine so far; None if the replica reports neither."""
    gauges = replica.status.gauges
    if "engine_state" not in gauges:
        return None
    state, passed = gauges["engine_state"], max(0.0, now - replica.seen)
    return (
        gauges["engine_busy_seconds"] + (passed if state == BUSY else 0.0),
        gauges["engine_paused_seconds"] + (passed if state == PAUSED else 0.0),
    )


def _prompt_tokens(replica: Replica) -> tuple[float, float]:
    """Return the prompt tokens of all samples so far, and those that the engine prefilled; zeros if the replica reports
    none."""
    gauges = replica.status.gauges
    return gauges.get("engine_prompted_tokens", 0.0), gauges.get("engine_prefilled_tokens", 0.0)


def _counters(seconds: tuple[float, float] | None) -> tuple[_Counter, _Counter] | None:
    return None if seconds is None else (_Counter(seconds[0]), _Counter(seconds[1]))


GroupResult = tuple[int, int, bool]
"""Result of a scored group: number of samples, number of right samples, and True if all rewards are equal."""


class ClosedGroups:
    """Counts the scored groups of each step as they are closed. Lines have the form of groups.jsonl."""

    def __init__(self) -> None:
        self._since: Counter[GroupResult] = Counter()
        """Results of the groups closed since the last trained group."""
        self._by_step: dict[int, Counter[GroupResult]] = {}

    def load(self, folder: Path, last_step: int) -> None:
        """Count the groups in a run's groups.jsonl that were closed after step `last_step`."""
        newer: list[Mapping[str, Any]] = []
        for line in newest_lines(folder / GROUPS):
            if 0 < line.get("step", 0) <= last_step:
                break
            newer.append(line)
        self.observe(reversed(newer))

    def observe(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count the groups in new lines of groups.jsonl, given oldest first."""
        for line in lines:
            if "samples" in line:  # else it was not scored
                self._since[line["samples"], line["right"], "equal_rewards" in line] += 1
            if (step := line.get("step")) is not None:
                self._by_step.setdefault(step, Counter()).update(self._since)
                self._since.clear()

    def take(self, step: int) -> dict[str, float]:
        """Return the metrics of a step's groups, and forget the groups of this and earlier steps. Empty if none of the
        step's groups is known."""
        groups = self._by_step.get(step)
        self._by_step = {later: counts for later, counts in self._by_step.items() if later > step}
        return metrics_of(groups) if groups else {}


def metrics_of(groups: Counter[GroupResult]) -> dict[str, float]:
    """Return the metrics of groups, by the names of docs/metrics.md.

    pass_at_<k> is for k = 1, 2, 4 and so on, the mean of the groups with at least k samples.
    """
    total = groups.total()
    metrics = {
        "scored_groups": float(total),
        "zero_variance_share": sum(count for (_, _, equal), count in groups.items() if equal) / total,
        "all_right_share": sum(count for (n, right, _), count in groups.items() if right == n) / total,
        "all_wrong_share": sum(count for (_, right, _), count in groups.items() if not right) / total,
    }
    k, most = 1, max(n for n, _, _ in groups)
    while k <= most:
        values = [(pass_at_k(n, right, k), count) for (n, right, _), count in groups.items() if n >= k]
        metrics[f"pass_at_{k}"] = sum(value * count for value, count in values) / sum(count for _, count in values)
        k *= 2
    return metrics


Result = TypeVar("Result")
TRIM_STEPS = 64
"""Number of steps between two trimmings of the board's ledger."""


class StepRecorder:
    """Moves steps, groups and samples of one run from the board to its folder. Waits for Redis and the disk."""

    def __init__(
        self,
        context: RunContext,
        files: RunFiles,
        curriculum: Curriculum,
        *,
        redis: RedisRetry,
        disk: FolderRetry,
        sync_totals: Mapping[str, float],
        on_step: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        """`sync_totals`: WeightSync.totals. `on_step` is called with each new step and its metrics."""
        self._context = context
        self._board = context.board
        self._files = files
        self._curriculum = curriculum
        self._redis = redis
        self._disk = disk
        self._sync_totals = sync_totals
        self._on_step = on_step
        self._usage = Usage()
        self._closed_groups = ClosedGroups()
        self._sampled_step = 0
        """The last step whose samples are in the run's folder."""
        self._last_fate: str | None = None
        """Entry id of the last group outcome in the run's folder; "" if there is none, None before it was read."""
        self._trimmed_at = 0
        """The last step in the run's folder when the board's ledger was trimmed last."""
        self._reported_sync: dict[str, float] = {}
        """Totals of the weight synchronisations that the metrics of earlier steps already contain."""
        self._reported_drops: Counter[str] | None = None
        """Number of dropped groups, by reason, that the metrics of earlier steps already contain; None before the first
        metrics after a start."""

    @property
    def knows_groups(self) -> bool:
        """True once the run's earlier closed groups were read."""
        return self._last_fate is not None

    async def take_over(self, evaluations: Iterable[Evaluation]) -> None:
        """Complete the folder's files, which an earlier coordinator wrote, from the board, and read them."""
        ledger, check = self._board.in_threads.ledger, self._context.store.in_threads.check
        await self._with_redis(self._files.take_over_steps, ledger, check, evaluations)
        self._sampled_step = await self._with_redis(self._files.rewind_samples, self._files.last_step)
        with waiting("the groups that the run has closed so far, to be counted"):
            last_fate = await asyncio.to_thread(self._curriculum.load, self._files.folder)
        await asyncio.to_thread(self._closed_groups.load, self._files.folder, self._files.last_step)
        if last_fate:
            await self._redis.call(self._board.continue_fates, last_fate, term=self._context.term)
        self._last_fate = last_fate

    def begin(self) -> None:
        """Exclude the weight synchronisations so far from the first step's metrics."""
        self._reported_sync = dict(self._sync_totals)

    def sample_usage(self) -> None:
        """Sample the utilisation of engines and GPUs."""
        self._usage.sample(self._context.fleet.devices())

    async def append_steps(self) -> None:
        """Append newly committed steps with their metrics to the run's folder, and also the new closed groups and
        samples."""
        ledger = await self._with_redis(self._files.next_steps, self._board.in_threads.ledger)
        await self.append_groups()  # at least those of these steps
        devices = self._context.fleet.devices()
        usage = self._usage.take(devices)
        measured = {**usage.metrics, **self._take_sync(len(ledger)), **await self._take_drops(len(ledger))}
        measured |= self._curriculum.metrics()
        kept_step = ledger[0].step - 1 if ledger else self._files.last_step
        if kept_step < self._sampled_step:  # committed again
            self._sampled_step = await self._with_redis(self._files.rewind_samples, kept_step)
        lines = []
        for entry in ledger:
            groups, speed = self._closed_groups.take(entry.step), speed_per_gpu(entry.metrics, devices)
            metrics = entry.metrics | measured | groups | speed | {"commit_time": entry.time}
            telemetry.record_step(self._context.run_id, entry.step, metrics)
            self._on_step(entry.step, metrics)
            lines.append((entry.step, {**metrics, **usage.line}))
        if lines:
            self._record_replicas(usage)
        await self._disk.in_thread(self._files.metrics.append, lines)
        await self._append_samples()
        await self.append_weights()
        await self._trim_ledger()

    async def append_groups(self) -> None:
        """Move the outcomes of closed groups from the board to the folder."""
        while fates := await self._redis.call(self._board.fates, self._last_fate or ""):
            end = await self._disk.in_thread(self._files.append_groups, fates)
            lines = [fate.line for fate in fates]
            await asyncio.to_thread(self._curriculum.observe, self._files.folder, lines, end)
            self._closed_groups.observe(lines)
            self._last_fate = fates[-1].entry_id
            await self._redis.call(self._board.forget_fates, self._last_fate, term=self._context.term)

    async def append_weights(self) -> None:
        """Move the digests of versions sent since the last call from the board to the folder.

        The board keeps the digests of versions that a step may still train on, and the digest before them. With it the
        trainer distinguishes an engine with old weights from an engine with weights that were never sent.
        """
        config = self._context.config
        if config.weights.has_receipts:
            sent = await self._redis.call(self._board.sent_weights)
            await self._disk.in_thread(self._files.append_weights, sent)
            kept = config.board.max_staleness + config.weights.interval
            before = self._files.last_step - kept
            await self._redis.call(self._board.forget_weights, term=self._context.term, before=before)

    async def _append_samples(self) -> None:
        """Copy the samples of new steps from the board to the folder. A restored board has none of earlier steps."""
        if kept := self._context.config.telemetry.samples_per_step:
            for step in range(self._sampled_step + 1, self._files.last_step + 1):
                page = await self._redis.call(self._board.sample_page, step, limit=kept)
                samples = [_without_tokens(sample) | {"entry": key} for key, sample in reversed(page)]
                await self._disk.in_thread(self._files.append_samples, samples)
                self._sampled_step = step

    async def _trim_ledger(self) -> None:
        """Trim the board's ledger every TRIM_STEPS steps, so that Redis doesn't grow with the number of steps."""
        written = self._files.last_step
        if written < self._trimmed_at + TRIM_STEPS:
            return
        await self._disk.in_thread(self._files.ledger.sync)
        await self._redis.call(self._board.trim_ledger, term=self._context.term, written=written)
        self._trimmed_at = written

    async def _with_redis(self, operation: Callable[..., Result], *arguments: Any) -> Result:
        """Run an operation on Redis and the run's folder in a thread; repeat it until both are available."""
        return await self._redis.call(self._disk.in_thread, operation, *arguments)

    def _record_replicas(self, usage: StepUsage) -> None:
        for name, shares in usage.replicas.items():
            for replica, share in shares.items():
                labels = {"relaxd.run_id": self._context.run_id, "relaxd.replica_id": replica}
                telemetry.record(f"replica.{name}", share, labels)

    def _take_sync(self, steps: int) -> dict[str, float]:
        """Return the seconds and bytes of weight synchronisations since the last call, divided by `steps`."""
        before, self._reported_sync = self._reported_sync, dict(self._sync_totals)
        since = {name: total - before.get(name, 0.0) for name, total in self._reported_sync.items()}
        return {"sync_seconds": 0.0} | {name: value / max(steps, 1) for name, value in since.items() if value}

    async def _take_drops(self, steps: int) -> dict[str, float]:
        """Return the number of groups dropped since the last call, in total and by reason, divided by `steps`."""
        counts = await self._redis.call(self._board.counts)
        dropped = Counter(counts.dropped_by_reason)
        before, self._reported_drops = self._reported_drops, dropped
        if before is None and counts.last_step > steps:
            return {}  # dropped before a restart of the coordinator: by which step isn't known
        fresh = dropped - (before or Counter())
        by_reason = {f"dropped_groups_{reason}": count / max(steps, 1) for reason, count in fresh.items()}
        return {"dropped_groups": sum(by_reason.values()), **by_reason}


def _without_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample without its tokens, which only the newest samples on the board keep because they are long."""
    return {name: value for name, value in sample.items() if name != "tokens"}
