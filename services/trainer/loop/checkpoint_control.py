"""Rank 0's control of a run's checkpoints: when to take one, when it is complete, which ones to remove, and which one
to load when a trainer starts.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from relaxd import __version__, telemetry
from relaxd.best_checkpoint import protected_steps
from relaxd.board import BoardUnavailable, LedgerEntry
from relaxd.config import RunConfig
from relaxd.config.trainer import CheckpointConfig
from relaxd.run_folder import checkpoint_path, checkpoint_steps, critic_folder, step_files
from relaxd.text import byte_amount
from services.trainer.loop import checkpoint_folders as folders
from services.trainer.loop.checkpoint_folders import BoardState, CheckpointBroken, CheckpointState, Ledger
from services.trainer.loop.commanded_rank import (
    CommandedRank,
    begin_checkpoint,
    end_checkpoint,
    prepare_checkpoints,
    restore_checkpoint,
    verify_checkpoint,
)
from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.disk_work import DiskRefused

logger = logging.getLogger(__name__)

SHOWN_ERRORS = 3
"""Maximum number of ranks whose errors a message about a failed checkpoint shows."""

REMOVAL_SECONDS = 5.0
"""Maximum time to wait for the removal of replaced checkpoints at the end of a run, in seconds."""

Answer = Future[tuple[str, int]]
"""Future path and step of a requested checkpoint, set when the checkpoint is on disk."""


class Checkpoints:
    """Starts, completes and removes checkpoints. Only rank 0's training thread uses it."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        term: int,
        rank: CommandedRank,
        announce: Callable[[int, bool], None] = lambda step, keep: None,
    ) -> None:
        """`announce`: called before a requested checkpoint starts, with its step, and True if it is never removed."""
        self._config = config
        self._announce = announce
        self._settings = config.trainer.checkpoint
        self._run_id = run_id
        self._run_folder = rank.run_folder
        self._record_folder = rank.record_folder
        self._term = term
        self._board = rank.board
        self._rank = rank
        self._schedule = Schedule(self._settings)
        self._wanted = False
        self._keep = False
        """True if the next checkpoint is never removed."""
        self._requesters: list[Answer] = []
        """Futures that `request` has returned for the next checkpoint."""
        self._saving: _Saving | None = None
        self._sealer = ThreadPoolExecutor(1, "seal-checkpoint")
        self._stalled = 0.0

    def prepare(self) -> None:
        """Make all ranks prepare memory for the first checkpoint, if the run takes checkpoints."""
        if self._settings.every:
            self._rank.run(prepare_checkpoints)

    def after_step(self, step: int, seconds: float, file: Path) -> None:
        """Count a committed step, and request a checkpoint if one is due.

        `seconds`: time of work on the step. `file`: the step's file, whose size counts.
        """
        self.after_replay(seconds, file)
        self._wanted |= self._schedule.due(step)

    def after_replay(self, seconds: float, file: Path) -> None:
        """Count a replayed step, because every restart before the next checkpoint replays the step again."""
        size = 0
        with suppress(OSError):  # such as a file that was removed meanwhile
            size = file.stat().st_size
        self._schedule.count(seconds=seconds, size=size)

    def request(self, *, rotate: bool = False) -> Answer:
        """Request a checkpoint as soon as possible. Without `rotate`, the checkpoint is never removed."""
        self._wanted = True
        self._keep |= not rotate
        self._requesters.append(Future())
        return self._requesters[-1]

    def complete_if_written(self) -> None:
        """Complete the running checkpoint if all ranks have written their files. Call this between rounds."""
        if self._saving is not None:
            self._check(self._saving)

    def begin_if_wanted(self, step: int) -> None:
        """Start a checkpoint of the learner's weights if one is requested or due. `step`: the last committed step."""
        if self._wanted and self._saving is None:
            try:
                self._begin(step)
            except BoardUnavailable as error:
                logger.debug("the checkpoint waits for the board: %s", error)

    def wait_for_copies(self) -> None:
        """Wait for a snapshot's copies, after which the weights may change. The learner enforces the deadline."""
        if self._rank.checkpoint.copied(0.0):
            return
        began = time.monotonic()
        deadline = began + self._config.trainer.collective_timeout_seconds
        while not self._rank.checkpoint.copied(TICK_SECONDS) and time.monotonic() < deadline:
            self._rank.channel.tick()
        self._stalled += time.monotonic() - began

    def take_stall(self) -> float:
        """Return the seconds for which checkpoints have blocked training since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def _begin(self, step: int) -> None:
        answers, keep = self._requesters, self._keep
        if answers:
            self._announce(step, keep)
        final = checkpoint_path(self._run_folder, step)
        if final.exists():  # the weights are unchanged since then
            self._wanted, self._keep, self._requesters = False, False, []
            if problem := self._mark(final) if keep else "":
                self._fail(answers, problem)
                return
            for answer in answers:
                answer.set_result((str(final), step))
            return
        state = self._state(step)
        self._wanted, self._keep, self._requesters = False, False, []
        self._schedule.begun()
        began = time.monotonic()
        partial = folders.partial_path(self._run_folder, step, self._term)
        with self._rank.rank0_only(f"creating {partial}"):
            problem = _make_empty_folder(partial)
        if problem:
            self._fail(answers, f"{partial} can't be created: {problem}")
            return
        checksum, size = self._rank.run(begin_checkpoint, partial)
        state = state.model_copy(update={"weights_checksum": checksum})
        self._stalled += time.monotonic() - began
        self._saving = _Saving(
            state=state, partial=partial, final=final, answers=answers, began=began, keep=keep, size=size
        )

    def _mark(self, path: Path) -> str:
        """Mark a checkpoint as never to be removed. Return "" or the error's message."""
        with self._rank.rank0_only(f"marking {path}"):
            try:
                folders.keep(path)
            except OSError as error:
                return str(error)
        return ""

    def _check(self, saving: "_Saving") -> None:
        """Complete the checkpoint if all ranks have written their files; abandon it if one failed or is late."""
        if saving.sealed is not None:
            if saving.sealed.done():
                self._saving = None
                self._answer(saving, saving.sealed.result())
            return
        reports = self._rank.checkpoint.reports()
        if reports is None:
            if time.monotonic() - saving.began > self._settings.timeout_seconds:
                late, seconds = self._rank.checkpoint.writing(), self._settings.timeout_seconds
                self._abandon(
                    saving, f"ranks {late} did not write within trainer.checkpoint.timeout_seconds = {seconds:g}"
                )
            return
        errors = [str(report["error"]) for report in reports if "error" in report]
        if errors:  # all ranks have ended: none still writes to the folder that is removed
            more = f"; so did {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
            self._abandon(saving, "; ".join(errors[:SHOWN_ERRORS]) + more)
        else:
            self._rank.run(end_checkpoint)
            files = {name: file for report in reports for name, file in report["files"].items()}
            saving.sealed = self._sealer.submit(self._seal, saving, files)

    def _seal(self, saving: "_Saving", files: Mapping[str, Any]) -> str:
        """Seal a written checkpoint, and remove older ones. Return "" or the error's message. Runs in a thread."""
        try:
            folders.seal(saving.partial, saving.final, saving.state, files, kept=saving.keep)
        except OSError as error:
            shutil.rmtree(saving.partial, ignore_errors=True)
            return f"{type(error).__name__}: {error}"
        self._remove_older()
        return ""

    def _answer(self, saving: "_Saving", problem: str) -> None:
        if problem:
            self._fail(saving.answers, f"{problem}; {self._room(saving)}")
            return
        step, seconds = saving.state.step, time.monotonic() - saving.began
        telemetry.record("checkpoint.seconds", seconds, {"relaxd.run_id": self._run_id})
        logger.info("checkpoint of step %d is on disk, after %.1f s", step, seconds)
        for answer in saving.answers:
            answer.set_result((str(saving.final), step))

    def remove_replaced(self) -> Future[None]:
        """Remove the previous best checkpoint in a thread, if it was replaced. Returns the removal's future."""
        return self._sealer.submit(self._remove_older, wait=True)

    def _remove_older(self, *, wait: bool = False) -> None:
        """Remove checkpoints and step files that are not needed any more: checkpoints in a thread.

        `wait`: wait for this thread, at most REMOVAL_SECONDS.
        """
        settings = self._settings
        try:
            protected = protected_steps(self._record_folder, settings.keep_best, self._run_folder)
            oldest = folders.rotate(self._run_folder, settings.keep, settings.max_bytes, protected)
            removal = folders.remove_rotated(self._run_folder)
            if oldest is not None and settings.keep_step_files == "until_checkpoint":
                remove_step_files(self._run_folder, up_to=min(oldest, self._followed()))
            if wait:
                removal.join(REMOVAL_SECONDS)
        except (OSError, ValueError) as error:
            logger.warning("what newer checkpoints replace could not be removed, and takes room: %s", error)

    def _followed(self) -> float:
        """Return the last step whose file a critic service doesn't need; infinity without a critic service."""
        if self._config.roles.critic.placement != "service":
            return math.inf
        settings, of_critic = self._settings, critic_folder(self._run_folder)
        protected = protected_steps(self._record_folder, settings.keep_best, of_critic)
        return folders.oldest_kept(of_critic, settings.keep, settings.max_bytes, protected) or 0

    def _abandon(self, saving: "_Saving", reason: str) -> None:
        self._saving = None
        self._rank.run(end_checkpoint)
        with self._rank.rank0_only(f"removing {saving.partial}"):
            shutil.rmtree(saving.partial, ignore_errors=True)
        self._fail(saving.answers, f"{reason}; {self._room(saving)}")

    def _room(self, saving: "_Saving") -> str:
        """Return an error message's part about the disk space that a checkpoint needs, and how to free space."""
        folder = saving.final.parent
        try:
            free = byte_amount(shutil.disk_usage(folder).free)
        except OSError as error:
            free = f"an unknown amount ({error})"
        return (
            f"it needs {byte_amount(saving.size)} on the disk of {folder}, which has {free} left. Remove what isn't "
            f"needed there, such as checkpoints that were taken on request, or lower trainer.checkpoint.keep = "
            f"{self._settings.keep}"
            + (f" or trainer.checkpoint.max_bytes = {limit}" if (limit := self._settings.max_bytes) else "")
        )

    def _fail(self, answers: Sequence[Answer], reason: str) -> None:
        logger.error("no checkpoint was written; earlier ones are kept: %s", reason)
        for answer in answers:
            answer.set_exception(DiskRefused(f"no checkpoint was written: {reason}"))

    def _state(self, step: int) -> CheckpointState:
        ledger = Ledger(step=0)
        if step:
            (entry,) = self._rank.steps(step - 1, 1)
            ledger = Ledger(step=step, term=entry.term, plan_sha256=folders.plan_sha256(entry.plan))
        # Read the cursor first, so that groups published meanwhile are beyond it.
        cursor = self._board.cursor()
        retries = [retry.group_id for retry in self._board.retries(limit=1_000_000)]
        open_groups = sorted({*self._board.open_groups(), *retries})
        counts = self._board.counts()
        return CheckpointState(
            run_id=self._run_id,
            step=step,
            term=self._term,
            ledger=ledger,
            board=BoardState(
                cursor=cursor,
                open_groups=tuple(open_groups),
                published=counts.published,
                trained=counts.trained,
                dropped=counts.dropped,
                dropped_by_reason=counts.dropped_by_reason,
            ),
            trainer=self._config.trainer.model_dump(mode="json"),
            algorithm=self._config.algorithm.model_dump(mode="json"),
            versions={"relaxd": __version__, "torch": version("torch"), "megatron-core": version("megatron-core")},
        )


@dataclass(kw_only=True)
class _Saving:
    """Checkpoint that the ranks are writing."""

    state: CheckpointState
    partial: Path
    final: Path
    answers: Sequence[Answer]
    began: float
    keep: bool
    size: int
    sealed: Future[str] | None = None
    """Future message of an error in sealing, "" for success; None while ranks write their files."""


def _make_empty_folder(folder: Path) -> str:
    """Create an empty folder, replacing an existing one. Return "" or the error's message."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return ""


def remove_step_files(run_folder: Path, up_to: float) -> None:
    """Remove the step files of all steps up to `up_to`."""
    for step, path in step_files(run_folder).items():
        if step <= up_to:
            os.unlink(path)


def restore(rank: CommandedRank, config: RunConfig, term: int) -> tuple[int, LedgerEntry | None]:
    """Load the newest usable checkpoint of a step in the ledger. Rename unusable newer ones; remove unfinished ones.

    Args:
        rank: rank 0; the others run its commands.
        config: the run's configuration, with this world's layout.
        term: term of this trainer.

    Returns:
        The checkpoint's step and the ledger's entry of that step. (0, None): there is none, or it is from before
        the first step.

    Raises:
        CheckpointError: the checkpoint is intact, but doesn't fit this model.
        BoardUnavailable: the ledger can't be read.
    """
    with rank.rank0_only("removing what earlier trainers did not finish"):
        folders.remove_partials(rank.run_folder, term)
    last = rank.board.last_step()
    for step in checkpoint_steps(rank.run_folder):
        path = checkpoint_path(rank.run_folder, step)
        if step > last:  # else it would be taken for a checkpoint of the future step with this number
            _put_aside(rank, path, f"the ledger ends earlier, at step {last}")
            continue
        if not rank.run(verify_checkpoint, path):
            _put_aside(rank, path, "it is broken")
            continue
        try:
            state = folders.read_state(path)
        except CheckpointBroken as error:
            _put_aside(rank, path, str(error))
            continue
        entry = rank.steps(step - 1, 1)[0] if step else None
        if entry and state.ledger.plan_sha256 != folders.plan_sha256(entry.plan):
            _put_aside(rank, path, f"it is of another step {step} than the ledger's")
            continue
        same = same_layout(state, config)
        if not same:
            logger.warning("checkpoint %s has another parallel layout: sums will differ in their order", path.name)
        rank.run(restore_checkpoint, path, step, same_layout=same)
        logger.info("checkpoint %s is loaded", path.name)
        return step, entry
    return 0, None


def _put_aside(rank: CommandedRank, path: Path, why: str) -> None:
    with rank.rank0_only(f"putting {path} aside"):
        aside = folders.put_aside(path)
    logger.error("checkpoint %s isn't used, and was renamed to %s: %s", path.name, aside, why)


def same_layout(state: CheckpointState, config: RunConfig) -> bool:
    """Return True if the configuration has the parallel layout with which the checkpoint was saved."""
    names = ("ranks", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    chunks = state.trainer.get("pipeline_chunks", 1)  # earlier releases had no such setting
    return chunks == config.trainer.pipeline_chunks and all(
        state.trainer.get(name) == getattr(config.trainer, name) for name in names
    )


class Schedule:
    """Counts the work since the last checkpoint, which a restart must replay, and tells when a checkpoint is due."""

    def __init__(self, settings: CheckpointConfig) -> None:
        self._settings = settings
        self._seconds = 0.0
        self._bytes = 0

    def count(self, *, seconds: float, size: int) -> None:
        """Count a step that a restart must replay.

        `seconds`: time of work on the step, without waits for groups. `size`: size of the step's file, in bytes.
        """
        self._seconds += seconds
        self._bytes += size

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due after step `step`, by its number or the counted work."""
        settings = self._settings
        if not settings.every:
            return False
        return (
            step % settings.every == 0
            or 0 < settings.replay_seconds <= self._seconds
            or 0 < settings.replay_bytes <= self._bytes
        )

    def begun(self) -> None:
        """Reset the counted work, because a checkpoint has begun."""
        self._seconds, self._bytes = 0.0, 0
