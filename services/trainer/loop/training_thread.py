"""Rank 0's training thread: takes groups, closes steps, updates the weights, commits steps and announces versions."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from relaxd import telemetry
from relaxd.algorithms import Algorithm
from relaxd.board import REFERENCE_WEIGHTS, TRAIN, BoardUnavailable, DropReason, LedgerEntry, microseconds
from relaxd.board.types import TooLate
from relaxd.config import RunConfig
from relaxd.roles import CRITIC, REFERENCE
from relaxd.run_folder import model_path
from relaxd.v1.rank_pb2 import RankProgress, VersionCommitted, WorkResponse
from relaxd.v1.replica_pb2 import REPLICA_WAIT_DISK, REPLICA_WAIT_UNSPECIFIED, ReplicaWait, WeightVersion
from relaxd.waiting import Backoff, waiting
from services.trainer.batch.groups import TrainGroup
from services.trainer.batch.step_plan import MicroBatchRound, StepPlan, step_file_path, write_step_file
from services.trainer.learner.update import SkippedUpdates, TooManySkippedUpdates, UpdateStats, step_metrics
from services.trainer.loop.checkpoint_control import Checkpoints, restore
from services.trainer.loop.checkpoint_folders import remove_older, sync_weights, weights_after, weights_path
from services.trainer.loop.samples import SampleFiles, all_samples, shown_samples
from services.trainer.loop.step_metrics import (
    bubble,
    group_times,
    metrics_of_step,
    performance,
    record_samples,
    trainer_times,
)
from services.trainer.loop.step_phases import StepBuilder, phases_for
from services.trainer.loop.step_profiler import ProfilePlan
from services.trainer.loop.thread_requests import Controls, SleepController
from services.trainer.loop.training_commands import (
    TrainingRank,
    begin_profile,
    discard,
    end_profile,
    end_step,
    export,
    keep_weights,
    replay,
    train_round,
    update,
)
from services.trainer.loop.training_queue import TrainingQueue
from services.trainer.loop.weight_read_lock import WeightReadLock
from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.disk_work import DiskRefused

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.02
"""Seconds between checks for requests while the training thread may not train."""
DISK_BACKOFF = Backoff(first_seconds=0.5, max_seconds=4.0)
"""Backoff between attempts to write a step file or weights while the disk refuses. Either may take gigabytes."""


class Training:
    """Drives all ranks through the steps of a run, from rank 0."""

    def __init__(
        self,
        *,
        config: RunConfig,
        run_id: str,
        rank: TrainingRank,
        intake: TrainingQueue,
        algorithm: Algorithm,
        weights: WeightReadLock,
        controls: "Controls[Training]",
        profiles: ProfilePlan,
        emit: Callable[[WorkResponse], None],
    ) -> None:
        """`emit` sends progress and new versions to the parent process."""
        self._config = config
        self._run_id = run_id
        self._run_folder = rank.run_folder
        self._term = weights.term
        self._board = rank.board
        self._intake = intake
        self._learner = rank.learner
        self._phases = phases_for(config, algorithm, rank)
        self.rank = rank
        self._weights = weights
        self.checkpoints = Checkpoints(config, run_id, weights.term, rank, self._ask_critic)
        self._sample_files = SampleFiles(rank.run_folder, config.telemetry.all_samples_steps)
        self._weights_checksum = 0
        self._refreshes = REFERENCE_WEIGHTS in rank.board.needs(TRAIN)
        """True if a reference service adopts the policy's weights."""
        self._reference = ""
        """Name of the reference weights that must have scored the next step's groups; "": the initial weights."""
        self._skipped = SkippedUpdates(config.trainer.max_skipped_updates)
        self._controls = controls
        self._profiles = profiles
        self._profiled = False
        """True while the open step is profiled."""
        self.sleeping = SleepController(rank, weights)
        self._emit = emit
        # In a colocated run every wait of this thread delays the engines' turn.
        self._take_seconds = IDLE_SECONDS if config.run.colocate else TICK_SECONDS
        rank.learner.world.disk.report = self._report
        rank.learner.report_to(lambda part: self._emit_progress(f"{self._place}, {part}"))
        self._place = ""
        self._reported = RankProgress()
        self._done_groups = 0
        self._iterations = 0
        self._reported_at = 0.0
        self._last_end = time.monotonic()

    def run(self) -> None:
        """Restore the weights, train all steps of the run, then keep serving requests. Never returns."""
        self._replay()
        self._announce({})
        while self._learner.step < self._config.run.steps:
            with telemetry.root_span("step", attributes={"relaxd.step": self._learner.step + 1}) as span:
                self._begin_profile(self._learner.step + 1)
                packer = self._phases.packer()
                open_step = self._fill(StepBuilder(self._learner.step + 1, packer, telemetry.inject(span)))
                if open_step is None:
                    continue
                plan = open_step.plan(self._config, self._term, self._reference)
                groups = [self.rank.groups[group_id] for group_id in plan.groups]
                if not self._write(open_step, plan, groups):
                    continue
                self.checkpoints.wait_for_copies()
                began = time.monotonic()
                updates = self._update(open_step, plan)
                open_step.worked += time.monotonic() - began - open_step.held_back
                self._write_reference(plan)
                self._commit(open_step, groups, plan, updates)
                self._set_reference(plan)
                self._announce(telemetry.inject(span))
                self._end_profile()
                self._export_if_due(plan.step)
                self.checkpoints.after_step(plan.step, open_step.worked, step_file_path(self._run_folder, plan.step))
                del open_step, groups, updates  # not kept while the next step fills
        while True:
            self._serve_requests(f"all {self._config.run.steps} steps are done")
            time.sleep(IDLE_SECONDS)  # idle: there is nothing left to train

    def _begin_profile(self, step: int) -> None:
        """Start profiling the step on all ranks, if planned. If the step starts over, the profile goes on."""
        if options := self._profiles.begin(step):
            self.rank.run(begin_profile, step, options)
            self._profiled = True

    def _end_profile(self) -> None:
        """Stop profiling on all ranks, and write the profiles, if the step was profiled."""
        if self._profiled:
            self._profiled = False
            self._report("writing profiles")
            self.rank.run(end_profile)

    def _fill(self, open_step: StepBuilder) -> StepBuilder | None:
        """Take groups and process them as they arrive, until the step closes. Return None if the step was discarded."""
        unavailable = False
        while True:
            self._serve_requests(f"step {open_step.number}: {len(open_step.members)} groups")
            try:
                if open_step.sealed or self._add(open_step):
                    # A step that is kept open by a pause may have to take further groups.
                    paused = self._controls.paused.is_set()
                    if (entry := open_step.packer.rest()) is not None:
                        self._take(open_step, entry, last=not paused)
                    if paused:
                        continue
                    complete = self._phases.close(open_step)
                    if self._starts_over(open_step):
                        return None
                    if not complete:
                        raise RuntimeError(f"a rank can't load groups of step {open_step.number}, which are open")
                    open_step.times = self._board.times(list(open_step.members))
                    return open_step
                began = time.monotonic()
                self._intake.take(open_step.number, self._take_seconds)
                open_step.waited += time.monotonic() - began
                unavailable = False
            except BoardUnavailable as error:
                if not unavailable:
                    logger.warning("waiting for the board, which is unavailable: %s", error)
                unavailable = True
                time.sleep(TICK_SECONDS)  # named: by the warning

    def _add(self, open_step: StepBuilder) -> bool:
        """Add available groups to the step, and process full rounds. Return True if the step may close."""
        selection = self._intake.select(open_step.number, open_step.members, self._reference)
        open_step.add(selection.chosen)
        while (entry := open_step.packer.full_round()) is not None:  # leaves a rest
            self._take(open_step, entry, last=False)
        return selection.may_close

    def _starts_over(self, open_step: StepBuilder) -> bool:
        """Discard the step and return True if any of its groups was closed. Raises BoardUnavailable."""
        lost = self._intake.lost(open_step.members)
        if lost:
            logger.warning("step %d starts over: groups %s were closed", open_step.number, ", ".join(lost))
            self._intake.forget(lost)
            open_step.end_spans()
            self.rank.run(discard)
        return bool(lost)

    def _write(self, open_step: StepBuilder, plan: StepPlan, groups: Sequence[TrainGroup]) -> bool:
        """Write the step file. While the disk refuses the file, for example because it is full, wait and retry.

        The other ranks wait for commands meanwhile, and requests are served: the weights are still those before the
        step. Returns False if the step was discarded during the wait, because some of its groups were closed.
        """
        began = time.monotonic()
        for _ in self._refusals(
            lambda: self._problem_of_writing(plan, groups),
            lambda problem: self._serve_requests(problem, REPLICA_WAIT_DISK),
        ):
            with suppress(BoardUnavailable):  # the commit waits for the board
                if self._starts_over(open_step):
                    return False
        open_step.wrote = time.monotonic() - began
        return True

    def _refusals(self, attempt: Callable[[], str], meanwhile: Callable[[str], None]) -> Iterator[str]:
        """Repeat a write until the disk accepts it. After each failure, pause, then yield the problem.

        Args:
            attempt: tries to write. Returns '' or the problem.
            meanwhile: called with the problem, repeatedly during the pause.
        """
        failures = 0
        with ExitStack() as waits:
            while problem := attempt():
                if not failures:
                    waits.enter_context(waiting(problem, disk=True))
                    logger.warning("%s", problem)
                failures += 1
                again = time.monotonic() + DISK_BACKOFF.pause(failures)
                while time.monotonic() < again:
                    meanwhile(problem)
                    time.sleep(IDLE_SECONDS)  # named: above
                yield problem

    def _problem_of_writing(self, plan: StepPlan, groups: Sequence[TrainGroup]) -> str:
        """Try to write the step file. Return "", or the text to report if the disk refuses."""
        path, columns = step_file_path(self._run_folder, plan.step), {group.group_id: group.columns for group in groups}
        with self.rank.rank0_only(f"writing {path}"):
            try:
                write_step_file(path, plan, columns)
            except OSError as error:
                return f"waiting for the disk of {path.parent}, to write the file of step {plan.step}: {error}"
        return ""

    def _write_reference(self, plan: StepPlan) -> None:
        """Write the weights that the reference service adopts after the step, if it adopts any.

        This happens before the commit, so that the ledger names only weights that exist.
        """
        if not (self._refreshes and REFERENCE in plan.refreshed):
            return
        folder = weights_path(self._run_folder, weights_after(plan.to_json()))

        def meanwhile(problem: str) -> None:  # the weights have no version, so no request is served
            self._report(problem, REPLICA_WAIT_DISK)
            self._abandon_if_draining()
            self.rank.channel.tick()

        began = time.monotonic()
        for _ in self._refusals(lambda: self._problem_of_export(folder), meanwhile):
            pass
        logger.info(
            "step %d: the weights for the reference are written, in %.1f s", plan.step, time.monotonic() - began
        )

    def _problem_of_export(self, folder: Path) -> str:
        """Try to write the policy's weights for the reference. Return "", or the text to report if the disk refuses."""
        self._report(f"writing {folder}")
        refused: object = self.rank.run(export, folder)
        if not isinstance(refused, DiskRefused):
            with self.rank.rank0_only(f"syncing {folder}"):
                try:
                    sync_weights(folder)
                    return ""
                except OSError as error:
                    refused = error
        return f"waiting for the disk of {folder.parent}, to write weights for the reference: {refused}"

    def _set_reference(self, plan: StepPlan) -> None:
        """Set the weights with which the reference must score the next step's groups. Remove older weights."""
        before, self._reference = self._reference, weights_after(plan.to_json()) if self._refreshes else ""
        if self._reference != before:
            # A replica may still be reading the previous weights.
            with self.rank.rank0_only("removing old weights of the reference"):
                try:
                    remove_older(self._run_folder, self._reference, kept=before)
                except OSError as error:
                    logger.warning("old weights of the reference could not be removed, and take room: %s", error)

    def _take(self, open_step: StepBuilder, entry: MicroBatchRound, *, last: bool) -> None:
        """Process one round of micro-batches on all ranks, while the step fills."""
        self._report(f"step {open_step.number}: {len(open_step.members)} groups")
        began = time.monotonic()
        self._phases.take(open_step, entry, last=last)
        open_step.worked += time.monotonic() - began

    def _update(self, open_step: StepBuilder, plan: StepPlan) -> list[UpdateStats]:
        """Run the step's optimizer updates on all ranks, once no broadcast reads the weights. Return their statistics.

        Several updates may take minutes, so an engine that joins meanwhile gets a copy of the previous weights.
        """
        updates: list[UpdateStats] = []
        keeps = len(plan.updates) > 1 and not self._config.run.colocate
        for mini_batch in plan.updates:
            place = f"step {plan.step}: update {len(updates) + 1} of {len(plan.updates)}"
            rounds = self._phases.rounds(mini_batch)
            for number, entry in enumerate(rounds, 1):
                self._report(place)
                self._abandon_if_draining()
                self.rank.run(train_round, entry, (), plan.whitening, last=number == len(rounds))
            if not updates:
                open_step.held_back = self._begin_change(plan.step)
                if keeps:
                    self.rank.run(keep_weights)
                    self._weights.publish(plan.step - 1)
            self._report(place)
            stats = self.rank.run(update, mini_batch.normalizer)
            updates.append(stats)
            groups = plan.groups_of(mini_batch)
            if stats.skipped:
                logger.warning(
                    "%s is skipped: %s, groups %s",
                    *(place, stats.shown, ", ".join(groups)),
                )
                self._check_skipped_updates(open_step, plan, groups, stats.cause)
            self._skipped.record(plan.step, groups, skipped=stats.skipped)
        if keeps:
            open_step.held_back += self._begin_change(plan.step)
        self._weights_checksum = self.rank.run(end_step, plan.refreshed)
        return updates

    def _abandon_if_draining(self) -> None:
        """If a drain was requested, hand the groups back and wait to be killed: finishing the updates may take minutes.

        The changed weights have no version, so only broadcasts of the previous weights are served.
        """
        if self._controls.draining.is_set():
            self._intake.release_all()
            self._controls.drained.set()
            while True:
                self._report("drained")
                self.rank.channel.tick()
                time.sleep(IDLE_SECONDS)  # named: `_report` says it

    def _begin_change(self, step: int) -> float:
        """Wait until no broadcast reads the weights; refuse broadcasts until `publish`. Return the seconds waited."""

        def on_wait() -> None:
            self._report(f"step {step}: waiting for a weight broadcast to end")
            self.rank.channel.tick()

        return self._weights.begin_change(f"step {step}", on_wait, TICK_SECONDS)

    def _check_skipped_updates(self, open_step: StepBuilder, plan: StepPlan, groups: Sequence[str], cause: str) -> None:
        """Drop the step's groups and raise TooManySkippedUpdates if this skipped update exceeds the limit."""
        try:
            self._skipped.check(plan.step, groups, cause)
        except TooManySkippedUpdates:
            # A board that is restored from the run's folder must not see this step as done.
            step_file_path(self._run_folder, plan.step).unlink(missing_ok=True)
            for taken in open_step.members.values():
                self._board.drop(taken.delivery, reason=DropReason.NON_FINITE_GRADIENTS)
            raise

    def _commit(
        self, open_step: StepBuilder, groups: Sequence[TrainGroup], plan: StepPlan, updates: Sequence[UpdateStats]
    ) -> None:
        """Commit the step to the ledger, with its plan, metrics and samples. Retry while the board is unavailable."""
        plan = replace(plan, skipped_updates=tuple(index for index, stats in enumerate(updates) if stats.skipped))
        now, ended = time.monotonic(), microseconds()
        seconds, self._last_end = now - self._last_end, now
        metrics = metrics_of_step(plan, groups, updates, self._learner)
        if self._config.roles.critic.placement == "service":
            metrics["revalued_groups"] = float(self._intake.take_redone(CRITIC))
        if self._refreshes:
            metrics["rescored_groups"] = float(self._intake.take_redone(REFERENCE))
        metrics |= {
            **trainer_times(open_step, seconds, self.checkpoints.take_stall()),
            **group_times(open_step, ended),
            **performance(
                groups,
                *(plan.epochs, open_step.worked, self._learner.world.size),
                *(self._learner.shape, self._learner.device_name),
            ),
            **bubble(plan, self._config.trainer),
            "tokens_per_second": metrics["tokens"] / max(seconds, 1e-9),
            "weights_checksum": float(self._weights_checksum),
            **self.sleeping.take_metrics(),
        }
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN
        kept = self._config.telemetry.samples_per_step
        samples = shown_samples(groups, plan.step, kept, plan.whitening, open_step.trace_ids())
        if self._config.telemetry.all_samples:
            self._sample_files.write(plan.step, all_samples(groups, plan.step, plan.whitening))
        traces = [taken.delivery.trace for taken in open_step.members.values()]
        while True:
            try:
                with telemetry.BatchSpan("commit_step", "settle", TRAIN, traces, {"relaxd.step": plan.step}):
                    self._board.commit_step(
                        term=self._term, step=plan.step, plan=plan.to_json(), metrics=metrics, samples=samples
                    )
                break
            except (BoardUnavailable, TooLate) as error:
                logger.warning("step %d can't be committed yet: %s", plan.step, error)
                self.rank.channel.tick()
                time.sleep(TICK_SECONDS)  # named: by the warning
        open_step.end_spans(ended)
        self._intake.forget(plan.groups)
        self._done_groups += len(groups)
        record_samples(self._run_id, groups, plan.step)
        if plan.step == self._config.run.steps:
            self._sample_files.await_written()
        logger.info(
            "step %d: reward %.3f, loss %.4g, gradient norm %.3g, %d groups in %.1f s",
            plan.step,
            *(metrics.get(name, math.nan) for name in ("reward_mean", "loss", "grad_norm")),
            *(len(groups), seconds),
        )

    def _announce(self, trace: dict[str, str]) -> None:
        """Allow broadcasts of the new version and announce it to the coordinator."""
        self._weights.publish(self._learner.step)
        weights = WeightVersion(term=self._term, version=self._learner.step)
        self._emit(WorkResponse(version=VersionCommitted(weights=weights, trace=trace)))

    def _ask_critic(self, step: int, keep: bool) -> None:
        """Ask a critic service, if the run has one, to write its checkpoint of the same step."""
        if self._config.roles.critic.placement == "service":
            self._board.ask_critic(term=self._term, step=step, keep=keep)

    def _replay(self) -> None:
        """Load the newest checkpoint. Replay the ledger's later steps from their step files."""
        self._report("looking for a checkpoint")
        done, _ = restore(self.rank, self._config, self._term)
        self.checkpoints.prepare()
        # Every step has an update, so the skipped updates that count reach no further back.
        step = max(0, done - self._config.trainer.max_skipped_updates - 1)
        for page in self.rank.steps.pages(step):
            for entry in page:
                if entry.step > done:
                    self._replay_step(entry)
                self._skipped.record_step(entry.step, entry.plan)
                self._reference = weights_after(entry.plan) if self._refreshes else ""
            self.rank.channel.tick()
        self._last_end = time.monotonic()

    def _replay_step(self, entry: LedgerEntry) -> None:
        """Replay one step of the ledger on all ranks."""
        self._report(f"replaying step {entry.step}")
        began = time.monotonic()
        updates, checksum = self.rank.run(replay, entry.step, entry.plan)
        self.checkpoints.after_replay(time.monotonic() - began, step_file_path(self._run_folder, entry.step))
        self._export_if_due(entry.step)  # the trainer may have died before the export
        was, now = entry.metrics.get("grad_norm"), step_metrics(updates, 1)["grad_norm"]
        if was is not None and abs(now - was) > 1e-3 * abs(was):
            logger.warning("replayed step %d: gradient norm %g, was %g", entry.step, now, was)
        elif checksum != entry.metrics.get("weights_checksum", checksum):
            logger.info("replayed step %d: the weights are not bitwise the same", entry.step)

    def _export_if_due(self, step: int) -> None:
        """Export the model of a committed step, if an export is due and missing. Training continues if the disk
        refuses."""
        every, folder = self._config.trainer.checkpoint.export_every, model_path(self._run_folder, step)
        if not every or step % every or folder.exists():
            return
        self._report(f"exporting the model of step {step}")
        exported = self.rank.run(export, folder)
        if isinstance(exported, DiskRefused):
            logger.error("the model of step %d is not exported: %s", step, exported)
        else:
            logger.info("the model of step %d is exported to %s", step, folder)

    def _serve_requests(self, detail: str, wait: "ReplicaWait.ValueType" = REPLICA_WAIT_UNSPECIFIED) -> None:
        """Serve other threads' requests. Return once training is neither paused, asleep nor draining."""
        while True:
            self._report(detail, wait)
            self.rank.channel.tick()
            self._controls.sleep_requests.run(self)
            asleep = self.sleeping.asleep
            self.checkpoints.complete_if_written()
            if not asleep:
                self._controls.requests.run(self)
                self.checkpoints.begin_if_wanted(self._learner.step)
            if self._controls.draining.is_set():
                if not self._controls.drained.is_set():
                    self._intake.release_all()
                    self._controls.drained.set()
                    self._report("drained")
            elif asleep:
                self._report("asleep: the engines use the devices")
            elif not self._controls.paused.is_set():
                return
            else:
                self._report("paused")
            time.sleep(IDLE_SECONDS)  # named: `_report` says it

    def _report(self, detail: str, wait: "ReplicaWait.ValueType" = REPLICA_WAIT_UNSPECIFIED) -> None:
        """Report progress to the parent when it changes, and every second as a sign of life.

        `wait`: the kind of wait that `detail` describes.
        """
        self._place = detail
        self._emit_progress(detail, wait)

    def _emit_progress(self, detail: str, wait: "ReplicaWait.ValueType" = REPLICA_WAIT_UNSPECIFIED) -> None:
        self._iterations += 1
        now = time.monotonic()
        progress = RankProgress(
            detail=detail,
            held_groups=self._intake.held,
            done_groups=self._done_groups,
            changing_weights=self._weights.changing,
            wait=wait,
        )
        if progress != self._reported or now - self._reported_at > 1.0:
            self._reported, self._reported_at = progress, now
            event = WorkResponse(progress=progress)
            event.progress.iterations = self._iterations
            self._emit(event)
