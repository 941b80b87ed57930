"""The active run, from pending to its end."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relaxd import telemetry
from relaxd.board import Counts, DropReason
from relaxd.data.curriculum.run_curriculum import Curriculum
from relaxd.data.dataset import RunData
from relaxd.data.vision import PromptHostAway
from relaxd.models import DataError
from relaxd.reasons import DropWatch
from relaxd.roles import TRAINER
from relaxd.run_folder import METRICS, read_lines
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.waiting import waiting
from services.coordinator.fleet.checkpoints import NoCriticCheckpoint, await_critic, save_candidate
from services.coordinator.fleet.registry import Version
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.health.health_manager import HealthManager
from services.coordinator.runs.alarms import RefusedGroups, RunAlarms, drops_to_pause_for
from services.coordinator.runs.ending import (
    ExportFailed,
    await_last_version,
    clear_board,
    drop_open_groups,
    export_model,
    reason_to_stop_early,
    save_last_checkpoint,
)
from services.coordinator.runs.evaluation import EvaluationFailed, Evaluator
from services.coordinator.runs.publisher import PromptsFailed, Publisher
from services.coordinator.runs.run_files import RunFiles, summarise
from services.coordinator.runs.starting import NEW_DATA_AND_CURRICULUM
from services.coordinator.runs.step_recorder import StepRecorder
from services.coordinator.runs.tracking import Tracking, needs_process
from services.coordinator.runs.wait_watcher import WaitWatcher
from services.coordinator.state.records import Evaluation, Outcome, Phase, RoleFailure, RunRecord, WeightsRecord
from services.coordinator.state.retries import FolderRetry, RedisRetry
from services.coordinator.state.store import StoreUnavailable
from services.coordinator.weights.gpu_handoff import GpuHandoff
from services.coordinator.weights.weight_sync import WeightSync

logger = logging.getLogger(__name__)
WATCH_SECONDS = 0.3
"""Seconds between two reads of the board's progress."""


class RunFailed(Exception):
    """A role has no working replica, and the run can't continue."""

    def __init__(self, failure: RoleFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class ActiveRun:
    """The active run. `main` continues it from the phase in its record to its end."""

    def __init__(
        self, context: RunContext, record: RunRecord, data: RunData, files: RunFiles, weights: WeightsRecord
    ) -> None:
        """Create the run in this process. `weights` is the state of weight synchronisation from an earlier run or
        coordinator."""
        self.record = record
        self.context = context
        self.config = context.config
        self.board = context.board
        self.fleet = context.fleet
        self._files = files
        self._changed = context.registry.changed
        self._redis = RedisRetry(f"run {context.run_id}")
        self._disk = FolderRetry(f"run {context.run_id}", files.folder)
        self.sync = WeightSync(context, weights)
        self._evaluator = Evaluator(context, data)
        self.handoff: GpuHandoff | None = None
        """GPU handoff of a colocated run; None if trainer and engines have separate GPUs."""
        if context.config.run.colocate:
            self.handoff = GpuHandoff(context, self.sync, training=self._wants_groups, evaluating=self._uses_engines)
        data.train.keep(files.folder)
        self.curriculum = Curriculum(context.config, data.train)
        self._publisher = Publisher(
            context, data, self.curriculum.visits, oldest_version=self.oldest_version, wanted=self._wants_groups
        )
        self.health = HealthManager(self, context, self.sync, self.handoff)
        self._drops = DropWatch()
        self._refused_groups = RefusedGroups()
        self.waiting = WaitWatcher(context, self._describe)
        self._tracking: Tracking | None = None
        """The run's trackers and notifiers; None if none are configured."""
        if needs_process(context.config):
            self._tracking = Tracking(context.run_id, context.config, files.folder, lambda: self.step)
        self._alarms = RunAlarms(
            context.config,
            files.folder,
            record=lambda: self.record,
            health=lambda: self.health.record,
            held_up=lambda: self.waiting.reason if self.waiting.sentence else None,
            wrong_weights=lambda: self.sync.wrong_engines() | self._refused_groups.problems(),
            user_messages=self._user_messages,
            step=lambda: self.step,
            clock=time.time,
        )
        self._recorder = StepRecorder(
            context,
            files,
            self.curriculum,
            redis=self._redis,
            disk=self._disk,
            sync_totals=self.sync.totals,
            on_step=self._alarms.observe,
        )
        self._going_since = time.monotonic()
        """Monotonic time, in seconds, at which training began or continued after a pause under this coordinator."""
        self._saving = asyncio.Lock()
        self._written: RunRecord | None = None
        """The record that was last written to run.json."""
        self._evaluation: asyncio.Task[None] | None = None
        """Task of the last evaluation that was started beside training."""
        self._evaluated = 0
        """Weight version of the last evaluation that was started beside training."""
        self._candidate: asyncio.Task[None] | None = None
        """Task that requests the checkpoint of the last candidate for the best version."""
        self.assignable = False
        """True once the board exists, so that replicas can start."""
        self.step = 0
        """Number of the last committed step seen on the board."""

    def oldest_version(self) -> int | None:
        """Return the oldest weight version that any engine serves; None if no engine serves or it is unknown."""
        announced = self.sync.announced
        return self.fleet.oldest_version(announced.term) if announced else None

    def _describe(self) -> dict[str, Any]:
        """Return those fields of a RunSnapshot that only the active run knows."""
        record, handoff = self.record, self.handoff
        announced = self.sync.announced
        ending = self._stopping() or record.phase not in (Phase.PENDING, Phase.RUNNING)
        return {
            "going_since": time.time() - (time.monotonic() - self._going_since),
            "training": record.phase != Phase.PENDING,
            "starting": record.reason if record.phase == Phase.PENDING else "",
            "stopping": (record.stop_reason or "completed") if ending else "",
            "paused": record.paused,
            "paused_since": record.paused_at.timestamp() if record.paused_at is not None else None,
            "rebuilding": self.health.rebuilding,
            "redis": self._publisher.redis,
            "gate": self._publisher.gate if self._wants_groups() else ("", ""),
            "announced": announced.version if announced is not None else None,
            "curriculum": self.curriculum.describe(),
            "sync_since": self.sync.began,
            "sync_failure": self.sync.last_failure,
            "sync_delay": self.sync.waiting_for,
            "handoff": handoff.waiting_for if handoff is not None else "",
        }

    # --- commands -----------------------------------------------------------------------------------------------

    async def pause(self, reason: str) -> None:
        """Stop publishing prompts until `resume`."""
        await self._save(paused=reason or "paused", paused_at=datetime.now(UTC))
        logger.warning("run %s is paused: %s", self.record.run_id, reason)

    async def resume(self) -> None:
        """End a pause, reset the counts of consecutive drops and retry the prompts whose reward failed."""
        failed = filtered = 0
        if self.assignable:  # else the board doesn't exist yet
            counts = await self._redis.call(self.board.counts)
            failed, filtered = counts.consecutive_drops, counts.consecutive_filtered
            if again := await self._redis.call(self.board.retry_unscored, term=self.context.term):
                logger.info("run %s: %d prompts whose reward failed are given again", self.record.run_id, again)
        self._going_since = time.monotonic()
        await self._save(paused=None, forgiven_drops=failed, forgiven_filtered=filtered)

    @property
    def autoscale_mode(self) -> str:
        """Mode of the autoscaler: "off", "dry_run" or "on"."""
        return self.record.autoscale or self.config.autoscale.mode

    async def set_autoscale(self, mode: str) -> None:
        """Change the mode of the autoscaler for the rest of the run."""
        await self._save(autoscale=mode)
        logger.info("run %s: the autoscaler is %s", self.record.run_id, mode)

    async def stop(self, reason: str) -> None:
        """Stop the run before its last step."""
        await self._save(stop_reason=reason or "stopped", reason=reason or "stopped", paused=None)

    # --- phases ---------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Take the run through its phases until its end is recorded. Raises Superseded, Fenced."""
        await self._redis.call(
            self.board.create,
            term=self.context.term,
            groups_per_step=self.config.trainer.groups_per_step,
            steps=self.config.run.steps,
        )
        await asyncio.to_thread(telemetry.write_traces, self.config.trace_folder(self.record.folder))
        await self._try_write_record()
        self.assignable = True
        self._changed.fire()
        parts = (self.handoff or self.sync, self._publisher, self.health, self.waiting)
        helpers = [asyncio.create_task(part.run_forever()) for part in parts]
        if self._tracking is not None:
            helpers.append(asyncio.create_task(self._tracking.run_forever()))
        helpers.append(asyncio.create_task(self._alarms.run_forever(self._tracking)))
        phases = asyncio.create_task(self._phases())
        try:
            # A helper ends only with an unexpected error, which ends the run's task, too.
            done, _ = await asyncio.wait([phases, *helpers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks = [phases, *helpers, *filter(None, (self._evaluation, self._candidate))]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._files.close)
            await asyncio.to_thread(telemetry.write_traces, None)

    async def _phases(self) -> None:
        try:
            await self._recorder.take_over(self.record.evaluations)
            await asyncio.to_thread(self._alarms.observe_all, read_lines(self._files.folder / METRICS))
            if self.record.phase == Phase.PENDING:
                await self._wait_for_fleet()
            if self.record.phase == Phase.RUNNING:
                await self._train()
            await self._finish()
        except RunFailed as error:
            failure = error.failure
            where = {"failed_role": failure.role, "failed_instance": failure.instance}
            await self._fail(Outcome.REPLICAS_FAILED, failure.reason, where)
        except EvaluationFailed as error:
            wrong_row = isinstance(error.__cause__, DataError)
            await self._fail(Outcome.DATA_FAILED if wrong_row else Outcome.EVALUATION_FAILED, str(error))
        except PromptsFailed as error:
            again = f"once the data are repaired: relaxd resume {self.record.run_id} --new-data"
            if isinstance(error.__cause__, PromptHostAway):
                waited = f"no answer for data.media_wait_seconds = {self.config.data.media_wait_seconds:g}"
                again = f"{waited}; once the host answers: relaxd resume {self.record.run_id}"
            elif self.config.data.curriculum.chooses:
                again = f"repair the data, and {NEW_DATA_AND_CURRICULUM}"
            await self._fail(Outcome.DATA_FAILED, f"{error}; {again}")

    async def _wait_for_fleet(self) -> None:
        """Wait for the replicas and the first weight synchronisation, then evaluate the initial model."""
        while not self._stopping():
            # A replica that fails at the run's start has never worked, so it won't recover.
            if (failure := self.fleet.failure() or self.sync.failure()) is not None:
                raise RunFailed(failure)
            missing = self.fleet.missing()
            if missing:
                reason = f"waiting for {', '.join(missing)}"
            elif not self.sync.up_to_date():
                last = f": {self.sync.last_failure}" if self.sync.last_failure else ""
                reason = f"waiting for the first weight synchronisation{last}"
            else:
                break
            await self._set_reason(reason)
            await self._changed.wait(WATCH_SECONDS)  # idle: the record's reason says what is awaited
        if not self._stopping():
            if self.config.eval.before:
                await self._evaluate(0, "evaluating before the first step")
            await self._save(phase=Phase.RUNNING, reason="")

    async def _train(self) -> None:
        """Watch the run's progress on the board until its last step."""
        self._recorder.begin()
        self._going_since = time.monotonic()
        while True:
            self._recorder.sample_usage()
            counts = await self._redis.call(self.board.counts)
            self.step = counts.last_step
            if counts.last_step != self._files.last_step:
                await self._recorder.append_steps()
            await self._recorder.append_groups()
            await self._disk.call(self._write_record)
            await self._redis.call(self.board.sweep, term=self.context.term)
            if counts.last_step >= self.config.run.steps or self._stopping():
                break
            if (failed := self.health.failure or self.sync.failure()) is not None:
                raise RunFailed(failed)
            if self._publisher.failure is not None:
                raise self._publisher.failure
            await self._check_drops(counts)
            if reason := self.curriculum.ended or self._reason_to_stop_early():
                await self.stop(reason)
            self._start_evaluation()
            missing = self.fleet.missing()
            await self._set_reason(f"waiting for {', '.join(missing)}" if missing else "")
            await self._changed.wait(WATCH_SECONDS)  # idle: watches the run; `waiting` says what it waits for
        if self._evaluation is not None:
            if self._stopping():
                self._evaluation.cancel()
            with waiting(f"the evaluation of version {self._evaluated}"):
                await asyncio.wait({self._evaluation})

    async def _finish(self) -> None:
        """Run the last synchronisation and evaluation, export the model and write the summary."""
        reason = self.record.stop_reason or "completed"
        completed = reason in ("completed", self._reason_to_stop_early())
        outcome = Outcome.COMPLETED if completed else Outcome.STOPPED
        await self._save(phase=Phase.STOPPING, reason=reason, paused=None)
        await clear_board(self.context, self._redis)
        steps = (await self._redis.call(self.board.counts)).last_step
        model = ""
        if steps:
            await self._recorder.append_steps()
            if self.config.trainer.checkpoint.every:
                await self._set_reason(f"{reason}; saving a checkpoint")
                await self._save_checkpoint(steps)
            if await self._last_sync(steps):
                try:
                    if self.config.eval.after:
                        await self._evaluate(steps, f"{reason}; evaluating after the last step")
                except EvaluationFailed as error:
                    await self._add_note(f"the evaluation after the last step failed: {error}")
            await self._set_reason(f"{reason}; exporting the model")
            model = await self._export()
        await self._end(Phase.STOPPED, outcome, reason, model)

    async def _fail(self, outcome: Outcome, reason: str, where: Mapping[str, str] | None = None) -> None:
        logger.error("run %s failed: %s", self.record.run_id, reason)
        await drop_open_groups(self.context, self._redis, DropReason.RUN_FAILED)
        await self._end(Phase.FAILED, outcome, reason, model="", where=where)

    async def _end(
        self, phase: Phase, outcome: Outcome, reason: str, model: str, where: Mapping[str, str] | None = None
    ) -> None:
        await self._recorder.append_groups()
        await self._recorder.append_weights()
        counts = await self._redis.call(self.board.counts)
        end = {"phase": phase, "outcome": outcome, "reason": reason, "end_time": datetime.now(UTC), **(where or {})}
        record = self.record.model_copy(update=end)
        metrics = await self._disk.in_thread(self._files.step_metrics) if self.handoff is not None else ()
        await self._disk.in_thread(self._files.write_summary, summarise(record, counts, model, metrics))
        with contextlib.suppress(StoreUnavailable):  # only cleanup: the group's name is unique
            await self.sync.close()
        size = await self._redis.call(self.board.measure)
        if self.handoff is not None:
            await self.handoff.rest()
        await self._save(**end, paused=None, board_bytes=size)
        await self._disk.call(self._write_record)
        logger.info("run %s ended after %d steps: %s", record.run_id, counts.last_step, reason)
        if self._tracking is not None:
            self._tracking.tell(self._alarms.status(self._tracking))
            await self._tracking.finish()

    # --- parts of phases ------------------------------------------------------------------------------------------

    def _wants_groups(self) -> bool:
        """Return True if prompts may be published. They may not while the run can't record the outcomes of groups."""
        going = self.record.phase == Phase.RUNNING and self.record.paused is None and not self._stopping()
        return going and self._recorder.knows_groups and not self._disk.waiting

    def _uses_engines(self) -> bool:
        """Start an evaluation if one is due. Return True if an evaluation uses the engines."""
        if self.record.phase == Phase.RUNNING:
            self._start_evaluation()
        return self._evaluator.in_progress > 0 or (self._evaluation is not None and not self._evaluation.done())

    def trainer_awake(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that keeps the trainer of a colocated run awake. It does nothing in other runs."""
        return self.handoff.trainer_awake() if self.handoff is not None else contextlib.nullcontext()

    def _reason_to_stop_early(self) -> str:
        record = self.record
        return reason_to_stop_early(self.config.run.stop_early, record.evaluations, record.patience_from)

    def _stopping(self) -> bool:
        return bool(self.record.stop_reason)

    async def _check_drops(self, counts: Counts) -> None:
        """Log a high share of dropped groups, and pause the run after too many consecutive drops."""
        await self._redis.call(self._refused_groups.look, counts, self.board.dropped)
        for warning in self._drops.observe(counts.dropped_by_reason, counts.published):
            logger.warning("run %s: %s", self.record.run_id, warning)
        if counts.consecutive_drops < self.record.forgiven_drops:
            await self._save(forgiven_drops=0)
        if counts.consecutive_filtered < self.record.forgiven_filtered:
            await self._save(forgiven_filtered=0)
        if self.record.paused is not None:
            return
        if reason := await drops_to_pause_for(self.context, self.record, self._redis, counts):
            await self.pause(reason)

    async def _evaluate(self, step: int, reason: str) -> None:
        """Evaluate the weights of a step, unless that was done before a restart."""
        if not self._evaluator.wanted or any(evaluation.step == step for evaluation in self.record.evaluations):
            return
        await self._set_reason(reason)
        announced = self.sync.announced
        if announced is None or announced.version != step:
            raise EvaluationFailed(f"the engines don't serve version {step}")
        await self._evaluate_version((announced.term, step))

    async def _evaluate_version(self, version: Version, *, beside_training: bool = False) -> None:
        """Evaluate a weight version, and record the result once the answers are in the run's folder."""
        step = version[1]
        try:
            with self._files.answers(step) as keep:
                found = await self._evaluator.evaluate(version, keep, beside_training=beside_training)
        except OSError as error:
            raise EvaluationFailed(f"its answers can't be written: {error}") from error
        metrics = await self._evaluator.summarise(found)
        logger.info("evaluation of version %d: %s", step, metrics)
        evaluation = Evaluation(step=step, metrics=metrics)
        await self._save(evaluations=(*self.record.evaluations, evaluation), evaluating=0)
        telemetry.record_step(self.record.run_id, step, metrics)
        # Before `add` replaces the file, it checks in Redis that no newer coordinator has taken over.
        await self._redis.call(self._disk.in_thread, self._files.metrics.add, evaluation)

    def _start_evaluation(self) -> None:
        """Start an evaluation beside training if eval.interval requires one and none is in progress."""
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
        if self.config.trainer.checkpoint.keep_best and (self._candidate is None or self._candidate.done()):
            await self._save(evaluating=version[1])  # saved first, so that the trainer keeps the checkpoint
            self._candidate = asyncio.create_task(save_candidate(self.context, version[1]))
        try:
            await self._evaluate_version(version, beside_training=True)
        except EvaluationFailed as error:
            await self._save(evaluating=0)
            await self._add_note(f"the evaluation of version {version[1]} failed: {error}")

    async def _last_sync(self, version: int) -> bool:
        """Wait until the engines serve the last weight version.

        On failure add a note to the record and return False.
        """
        with waiting(f"the engines to serve the last version, {version}"), self.sync.without_interval():
            failure = await await_last_version(self.context, self.sync, version)
        if failure:
            await self._add_note(f"the engines don't serve the last version: {failure}")
        return not failure

    async def _export(self) -> str:
        """Have the trainer export the model and return its path. On failure add a note to the record and return ""."""
        try:
            with self.trainer_awake(), waiting("the trainer to export the model", on=TRAINER):
                return await export_model(self.context)
        except ExportFailed as error:
            await self._add_note(f"the model was not exported: {error}")
            return ""

    async def _save_checkpoint(self, step: int) -> None:
        """Have the trainer and the critic service, if any, save a checkpoint of the last step.

        Add a note for each failure.
        """
        try:
            with self.trainer_awake():
                await save_last_checkpoint(self.context)
            await await_critic(self.context, Path(self.record.folder), step)
        except ExportFailed as error:
            await self._add_note(f"there is no checkpoint of the last step: {error}")
        except NoCriticCheckpoint as error:
            await self._add_note(str(error))

    # --- records --------------------------------------------------------------------------------------------------

    async def _set_reason(self, reason: str) -> None:
        if reason != self.record.reason:
            logger.info("run %s: %s", self.record.run_id, reason or "training")
            await self._save(reason=reason)

    async def _add_note(self, note: str) -> None:
        logger.warning("run %s: %s", self.record.run_id, note)
        await self._save(notes=(*self.record.notes, note))

    async def _save(self, **changes: Any) -> None:
        """Change fields of the run's record: first in Redis, then in this process, then in run.json."""
        async with self._saving:
            record = self.record.model_copy(update=changes)
            await self._redis.call(self.context.store.save_run, record)
            self.record = record
        await self._try_write_record()
        self.waiting.refresh()
        self._changed.fire()

    async def _try_write_record(self) -> None:
        """Write run.json.

        If that fails, only log the error: commands don't wait for the disk, and a later write catches up.
        """
        try:
            await self._write_record()
        except OSError as error:
            logger.warning("run %s: run.json can't be written, and will be: %s", self.record.run_id, error)

    async def _write_record(self) -> None:
        """Write the run's record to run.json, unless the file is up to date. Raises OSError."""
        async with self._saving:  # one writes at a time
            if self._written is not self.record:
                await asyncio.to_thread(self._files.write_record, self.record)
                self._written = self.record

    def _user_messages(self) -> list[str]:
        """Return the recent messages of users' code that replicas of the run report."""
        statuses = [one.status for one in self.context.registry.all() if one.status.user_messages]
        return [text for one in statuses if one.run_id == self.context.run_id for text in one.user_messages]

    def alarms(self) -> list[pb.Alarm]:
        """Return the run's open alarms."""
        return self._alarms.current() + (self._tracking.alarms() if self._tracking is not None else [])
