"""One run, from pending to its end."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from relaxd import telemetry
from relaxd.board import Board, BoardUnavailable, Counts, stages_for
from relaxd.config import RunConfig
from relaxd.data.dataset import RunData
from relaxd.v1.replica_pb2 import ROLE_ROLLOUT, ROLE_TRAINER
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry, Version
from services.coordinator.health.health_manager import HealthManager
from services.coordinator.runs.evaluation import EvaluationFailed, Evaluator
from services.coordinator.runs.exporting import ExportFailed, export_model
from services.coordinator.runs.publisher import Publisher
from services.coordinator.runs.retention import Retention
from services.coordinator.runs.run_files import RunFiles, summarise
from services.coordinator.runs.usage import Usage
from services.coordinator.state.records import Evaluation, Phase, RunRecord
from services.coordinator.state.store import Store, StoreUnavailable
from services.coordinator.weights.gpu_handoff import GpuHandoff
from services.coordinator.weights.weight_sync import WeightSync

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

WATCH_SECONDS = 0.3
"""How often the board is asked how far the run is."""
LET_GO_SECONDS = 30.0
"""How long the trainer has to let go of the groups of a run that is stopped early."""


class RunFailed(Exception):
    """The run can't go on."""


@dataclass(frozen=True)
class Context:
    """What every run works with."""

    store: Store
    registry: Registry
    peers: Peers
    redis_url: str
    retention: Retention
    launcher: str = ""
    """The launcher's address; empty: there is none."""


def too_many_drops(config: RunConfig, *, failed: int, filtered: int) -> str:
    """Say why a run should pause that has dropped so many groups since its last step; "" as long as it should not."""
    per_step, board = config.trainer.groups_per_step, config.board
    most = board.max_consecutive_drops or max(64, 2 * per_step)
    if failed > most:
        return f"{failed} groups in a row failed without a trained step (board.max_consecutive_drops allows {most})"
    max_filtered = board.max_filtered_steps * per_step
    if 0 < max_filtered < filtered:
        return (
            f"the algorithm filtered {filtered} groups in a row without a trained step (board.max_filtered_steps = "
            f"{board.max_filtered_steps} allows {max_filtered}): is the task too easy or too hard for the model?"
        )
    return ""


class ActiveRun:
    """The run that is under way. `main` takes it from whatever phase its record says to its end."""

    def __init__(self, context: Context, record: RunRecord, config: RunConfig, data: RunData, files: RunFiles) -> None:
        self.record = record
        self.config = config
        self._context = context
        self._files = files
        self._changed = context.registry.changed
        self.board = Board(context.redis_url, record.run_id, stages_for(config), config.board)
        self.fleet = Fleet(context.registry, record.run_id)
        self.sync = WeightSync(context.store, context.store.weights(), self.fleet, context.peers, config.weights)
        self._evaluator = Evaluator(config, data, self.fleet, context.peers)
        self.turns: GpuHandoff | None = None
        """Who has the devices; None: trainer and engines have devices of their own."""
        if config.run.colocate:
            self.turns = GpuHandoff(
                config,
                self.board,
                self.fleet,
                context.peers,
                self.sync,
                training=self._wants_groups,
                evaluating=self._evaluates,
            )
        self._publisher = Publisher(
            self.board,
            record.run_id,
            context.store.term,
            config,
            data,
            oldest_version=self.oldest_version,
            wanted=self._wants_groups,
            changed=self._changed,
        )
        self.health = HealthManager(
            self,
            config,
            self.board,
            self.fleet,
            self.sync,
            context.store,
            context.registry,
            context.peers,
            context.launcher,
        )
        self._usage = Usage()
        self._synced_seconds = 0.0
        """Of the time that weight synchronisations took, what steps have told already."""
        self._saving = asyncio.Lock()
        self._evaluation: asyncio.Task[None] | None = None
        """The evaluation beside training that was begun last, and the version of which it was."""
        self._evaluated = 0
        self.assignable = False
        """The board is there, so that replicas can begin."""

    def oldest_version(self) -> int | None:
        """The oldest version on any engine that takes prompts."""
        announced = self.sync.announced
        return self.fleet.oldest_version(announced.term) if announced else None

    @property
    def waiting_for(self) -> str:
        """What the run waits for; empty while nothing holds it up."""
        return self._publisher.waiting_for if self._wants_groups() else ""

    # --- what people ask for ------------------------------------------------------------------------------------

    async def pause(self, reason: str) -> None:
        """Publish nothing more until `resume`."""
        await self._save(paused=reason or "paused")
        logger.warning("run %s is paused: %s", self.record.run_id, reason)

    async def resume(self) -> None:
        """End a pause; drops in a row so far are forgiven."""
        failed = filtered = 0
        if self.assignable:  # else it began just now, and the board does not know it yet
            counts = await self._patiently(self.board.counts)
            failed, filtered = counts.consecutive_drops, counts.consecutive_filtered
        await self._save(paused=None, forgiven_drops=failed, forgiven_filtered=filtered)

    async def stop(self, reason: str) -> None:
        """End the run early."""
        await self._save(stop_reason=reason or "stopped", reason=reason or "stopped", paused=None)

    # --- the phases -----------------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Do the whole run; returns once its end is recorded. Raises Superseded, Fenced."""
        await self._patiently(
            self.board.create,
            term=self._context.store.term,
            groups_per_step=self.config.trainer.groups_per_step,
            steps=self.config.run.steps,
        )
        async with self._saving:  # a pause or stop that came at once writes the same file
            await asyncio.to_thread(self._files.write_record, self.record)
        self.assignable = True
        self._changed.fire()
        parts = (self.turns or self.sync, self._publisher, self.health)
        helpers = [asyncio.create_task(part.run_forever()) for part in parts]
        phases = asyncio.create_task(self._phases())
        try:
            # A helper ends only by an error that it can't handle: then so does the run's task.
            done, _ = await asyncio.wait([phases, *helpers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks = [phases, *helpers, *([self._evaluation] if self._evaluation else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _phases(self) -> None:
        try:
            await self._rewrite_metrics()
            if self.record.phase == Phase.PENDING:
                await self._gather()
            if self.record.phase == Phase.RUNNING:
                await self._train()
            await self._finish()
        except (RunFailed, EvaluationFailed) as error:
            await self._fail(str(error))

    async def _gather(self) -> None:
        """Wait for the replicas and the first weights, and evaluate the model as it comes."""
        while not self._stopping():
            if (failure := self.fleet.failure()) is not None:  # from the start: nothing worked that could come back
                raise RunFailed(failure)
            missing = self.fleet.missing()
            if missing:
                reason = f"waiting for {', '.join(missing)}"
            elif not self.sync.up_to_date():
                trouble = f": {self.sync.last_failure}" if self.sync.last_failure else ""
                reason = f"waiting for the first weight synchronisation{trouble}"
            else:
                break
            await self._say(reason)
            await self._changed.wait(WATCH_SECONDS)
        if not self._stopping():
            await self._evaluate(0, "evaluating before the first step")
            await self._save(phase=Phase.RUNNING, reason="")

    async def _train(self) -> None:
        """Watch over the run until its last step."""
        self._synced_seconds = self.sync.seconds
        while True:
            self._usage.look(self.fleet.devices())
            counts = await self._patiently(self.board.counts)
            if counts.last_step > self._files.last_step:
                await self._append_metrics()
            if counts.last_step >= self.config.run.steps or self._stopping():
                break
            if self.health.failure:
                raise RunFailed(self.health.failure)
            await self._check_drops(counts)
            self._begin_evaluation()
            missing = self.fleet.missing()
            await self._say(f"waiting for {', '.join(missing)}" if missing else "")
            await self._changed.wait(WATCH_SECONDS)
        if self._evaluation is not None:
            if self._stopping():
                self._evaluation.cancel()
            await asyncio.wait({self._evaluation})

    async def _finish(self) -> None:
        """Last synchronisation, last evaluation, export, summary."""
        reason = self.record.stop_reason or "completed"
        await self._save(phase=Phase.STOPPING, reason=reason, paused=None)
        await self._clear_board()
        steps = (await self._patiently(self.board.counts)).last_step
        model = ""
        if steps:
            await self._append_metrics()
            if await self._last_sync(steps):
                try:
                    await self._evaluate(steps, f"{reason}; evaluating after the last step")
                except EvaluationFailed as error:
                    await self._note(f"the evaluation after the last step failed: {error}")
            await self._say(f"{reason}; exporting the model")
            model = await self._export()
        await self._end(Phase.STOPPED, reason, model)

    async def _fail(self, reason: str) -> None:
        logger.error("run %s failed: %s", self.record.run_id, reason)
        await self._drop_open("run_failed")
        await self._end(Phase.FAILED, reason, model="")

    async def _end(self, phase: Phase, reason: str, model: str) -> None:
        counts = await self._patiently(self.board.counts)
        record = self.record.model_copy(update={"phase": phase, "reason": reason, "end_time": datetime.now(UTC)})
        ledger = await self._patiently(self.board.ledger) if self.turns is not None else ()
        await asyncio.to_thread(self._files.write_summary, summarise(record, counts, model, ledger))
        with contextlib.suppress(StoreUnavailable):  # the group's name is unique: leaving it is only tidy
            await self.sync.close()
        size = await self._patiently(self.board.measure)
        await self._save(phase=phase, reason=reason, end_time=record.end_time, paused=None, board_bytes=size)
        logger.info("run %s has ended after %d steps: %s", record.run_id, counts.last_step, reason)

    # --- parts of the phases --------------------------------------------------------------------------------------

    def _wants_groups(self) -> bool:
        return self.record.phase == Phase.RUNNING and self.record.paused is None and not self._stopping()

    def _evaluates(self) -> bool:
        """Whether an evaluation asks the engines; one that wants their present version begins now."""
        if self.record.phase == Phase.RUNNING:
            self._begin_evaluation()
        return self._evaluator.under_way > 0 or (self._evaluation is not None and not self._evaluation.done())

    def trainer_awake(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the trainer gets its turn, in a colocated run, whatever the next step."""
        return self.turns.trainer_awake() if self.turns is not None else contextlib.nullcontext()

    def _stopping(self) -> bool:
        return bool(self.record.stop_reason)

    async def _check_drops(self, counts: Counts) -> None:
        """Pause when nothing but drops comes out of the stages."""
        if counts.consecutive_drops < self.record.forgiven_drops:
            await self._save(forgiven_drops=0)
        if counts.consecutive_filtered < self.record.forgiven_filtered:
            await self._save(forgiven_filtered=0)
        if self.record.paused is not None:
            return
        problem = too_many_drops(
            self.config,
            failed=counts.consecutive_drops - self.record.forgiven_drops,
            filtered=counts.consecutive_filtered - self.record.forgiven_filtered,
        )
        if problem:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped_by_reason.items()))
            await self.pause(f"{problem}; dropped so far: {reasons}")

    async def _evaluate(self, step: int, reason: str) -> None:
        """Evaluate the weights of a step, unless that was done before a restart."""
        if not self._evaluator.wanted or any(evaluation.step == step for evaluation in self.record.evaluations):
            return
        await self._say(reason)
        announced = self.sync.announced
        if announced is None or announced.version != step:
            raise EvaluationFailed(f"version {step} is not on the engines")
        await self._keep_evaluation(step, await self._evaluator.evaluate((announced.term, step)))

    def _begin_evaluation(self) -> None:
        """Begin an evaluation beside training, where eval.interval wants one and none is under way."""
        interval, version = self.config.eval.interval, self.oldest_version()
        if not interval or version is None or not self._evaluator.wanted or version >= self.config.run.steps:
            return
        if self._evaluation is not None and not self._evaluation.done():
            return
        last = max((evaluation.step for evaluation in self.record.evaluations), default=0)
        announced = self.sync.announced
        if announced is not None and version // interval > max(last, self._evaluated) // interval:
            self._evaluated = version
            self._evaluation = asyncio.create_task(self._evaluate_beside((announced.term, version)))

    async def _evaluate_beside(self, version: Version) -> None:
        try:
            metrics = await self._evaluator.evaluate(version, or_later=True)
        except EvaluationFailed as error:
            await self._note(f"the evaluation of version {version[1]} failed: {error}")
        else:
            await self._keep_evaluation(version[1], metrics)

    async def _keep_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        logger.info("evaluation of version %d: %s", step, metrics)
        await self._save(evaluations=(*self.record.evaluations, Evaluation(step=step, metrics=metrics)))
        telemetry.record_step(self.record.run_id, step, metrics)
        await self._rewrite_metrics()

    async def _last_sync(self, version: int) -> bool:
        """Wait until the engines serve the last version. False, and a note, if they don't come to.

        A trainer or engine that starts anew has all the time it needs for that.
        """
        weights = self.config.weights
        limit = 2 * (weights.connect_timeout_seconds + weights.timeout_seconds)
        seen = unable = time.monotonic()
        while True:
            announced, now = self.sync.announced, time.monotonic()
            if announced is not None and announced.version == version and self.sync.up_to_date():
                return True
            if self.fleet.has(ROLE_TRAINER, ROLE_ROLLOUT):
                seen = now
            if self.fleet.trainer() is None or not self.fleet.engines():
                unable = now
            failure = self.fleet.failure()
            if failure is None and now - seen > self.config.health.role_timeout_seconds:
                failure = f"there is no {' and no '.join(self.fleet.missing())}"
            if failure is None and now - unable > limit:
                failure = self.sync.last_failure or "no synchronisation began"
            if failure is not None:
                await self._note(f"the engines don't serve the last version: {failure}")
                return False
            await self._changed.wait(WATCH_SECONDS)

    async def _export(self) -> str:
        """Let the trainer write the model; returns its path, or "" with a note."""
        try:
            with self.trainer_awake():
                away_seconds = self.config.health.role_timeout_seconds
                return await export_model(self.fleet, self._context.peers, away_seconds=away_seconds)
        except ExportFailed as error:
            await self._note(f"the model was not exported: {error}")
            return ""

    async def _clear_board(self) -> None:
        """Drop what is still open, once the trainer has let go of it."""
        deadline = asyncio.get_running_loop().time() + LET_GO_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            trainer = self.fleet.trainer()
            open_groups = (await self._patiently(self.board.counts)).open
            if not open_groups or trainer is None or not trainer.status.held_groups:
                break
            await self._changed.wait(WATCH_SECONDS)
        await self._drop_open("run_ended")

    async def _drop_open(self, reason: str) -> None:
        await self._patiently(self.board.set_gate, term=self._context.store.term, oldest_version=None, open=False)
        for group_id in await self._patiently(self.board.open_groups):
            await self._patiently(self.board.drop, group_id, reason=reason, counts="")
        await self._patiently(self.board.purge, term=self._context.store.term)

    # --- keeping and telling --------------------------------------------------------------------------------------

    async def _say(self, reason: str) -> None:
        if reason != self.record.reason:
            logger.info("run %s: %s", self.record.run_id, reason or "training")
            await self._save(reason=reason)

    async def _note(self, note: str) -> None:
        logger.warning("run %s: %s", self.record.run_id, note)
        await self._save(notes=(*self.record.notes, note))

    async def _save(self, **changes: Any) -> None:
        """Change the record, in Redis first."""
        async with self._saving:
            record = self.record.model_copy(update=changes)
            await self._patiently(self._context.store.save_run, record)
            self.record = record
            await asyncio.to_thread(self._files.write_record, record)
        self._changed.fire()

    async def _rewrite_metrics(self) -> None:
        ledger = await self._patiently(self.board.ledger)
        steps = [(entry.step, entry.metrics) for entry in ledger]
        await asyncio.to_thread(self._files.rewrite_ledger, ledger)
        await asyncio.to_thread(self._files.rewrite_metrics, steps, self.record.evaluations)

    async def _append_metrics(self) -> None:
        ledger = await self._patiently(self.board.ledger, self._files.last_step)
        synced, self._synced_seconds = self.sync.seconds - self._synced_seconds, self.sync.seconds
        seen = {**self._usage.take(self.fleet.devices()), "sync_seconds": synced / max(len(ledger), 1)}
        steps = [(entry.step, {**entry.metrics, **seen}) for entry in ledger]
        for step, metrics in steps:
            telemetry.record_step(self.record.run_id, step, metrics)
        await asyncio.to_thread(self._files.append_ledger, ledger)
        await asyncio.to_thread(self._files.append_metrics, steps)

    async def _patiently(self, operation: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Do something in Redis, in a thread, as soon as Redis is there."""
        attempt = 0
        while True:
            try:
                return await asyncio.to_thread(operation, *arguments, **named)
            except (StoreUnavailable, BoardUnavailable) as error:
                if attempt % 20 == 0:
                    logger.warning("run %s waits for Redis: %s", self.record.run_id, error)
                attempt += 1
                await asyncio.sleep(0.5)
