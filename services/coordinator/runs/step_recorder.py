"""Recording of the board in the run's folder: committed steps, closed groups and samples."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from relaxd import telemetry
from relaxd.data.curriculum.run_curriculum import Curriculum
from relaxd.waiting import waiting
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.runs.run_files import RunFiles
from services.coordinator.runs.step_metrics import ClosedGroups, StepUsage, Usage, speed_per_gpu
from services.coordinator.state.records import Evaluation
from services.coordinator.state.retries import FolderRetry, RedisRetry

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
        """`sync_totals`: WeightSync.totals; `on_step` is called with each new step and its metrics."""
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
        """Synchronisation totals that the metrics of earlier steps already contain."""
        self._reported_drops: Counter[str] | None = None
        """Drops by reason that earlier steps' metrics contain; None before the first metrics after a start."""

    @property
    def knows_groups(self) -> bool:
        """True once the run's earlier closed groups were read."""
        return self._last_fate is not None

    async def take_over(self, evaluations: Iterable[Evaluation]) -> None:
        """Complete an earlier coordinator's files in the folder from the board, and read them."""
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
        """Exclude the synchronisations so far from the first step's metrics."""
        self._reported_sync = dict(self._sync_totals)

    def sample_usage(self) -> None:
        """Sample the utilisation of engines and GPUs."""
        self._usage.sample(self._context.fleet.devices())

    async def append_steps(self) -> None:
        """Append new steps with their metrics, their groups and samples."""
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
        """Copy the samples of new steps. A restored board has none of earlier steps."""
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
        """Run an operation on Redis and the folder, as soon as both are available."""
        return await self._redis.call(self._disk.in_thread, operation, *arguments)

    def _record_replicas(self, usage: StepUsage) -> None:
        for name, shares in usage.replicas.items():
            for replica, share in shares.items():
                labels = {"relaxd.run_id": self._context.run_id, "relaxd.replica_id": replica}
                telemetry.record(f"replica.{name}", share, labels)

    def _take_sync(self, steps: int) -> dict[str, float]:
        """Return seconds and bytes of the synchronisations since the last call, per step."""
        before, self._reported_sync = self._reported_sync, dict(self._sync_totals)
        since = {name: total - before.get(name, 0.0) for name, total in self._reported_sync.items()}
        return {"sync_seconds": 0.0} | {name: value / max(steps, 1) for name, value in since.items() if value}

    async def _take_drops(self, steps: int) -> dict[str, float]:
        """Return the groups dropped since the last call, in total and by reason, per step."""
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
