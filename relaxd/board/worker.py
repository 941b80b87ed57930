"""Board (blocking), AsyncBoard (asyncio), and StageWorker.

A stage's worker takes groups, processes several at once, renews its holds, and commits in batches.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span

from relaxd.board.connection import AsynchronousFace, BlockingFace
from relaxd.board.sides.coordinator_side import CoordinatorSide
from relaxd.board.sides.stage_side import StageSide
from relaxd.board.sides.trainer_side import TrainerSide
from relaxd.board.types import (
    MICROSECONDS,
    BoardError,
    BoardUnavailable,
    Column,
    ColumnError,
    ColumnsTooLarge,
    Delivery,
    DropKind,
    DropReason,
    RunMissing,
    StageTime,
    TooLate,
    microseconds,
)
from relaxd.telemetry import open_stage_span, record
from relaxd.waiting import waiting


class Board(BlockingFace, CoordinatorSide, StageSide, TrainerSide):
    """A run's groups, stages, counters and step ledger in Redis. Thread-safe; its operations block.

    `Board(redis_url, run_id, stages, limits, *, timeout_seconds=5.0, retry_seconds=10.0, orphan_seconds=60.0)`:
    timeout_seconds limits each wait for Redis. While Redis is unavailable, an operation is retried for retry_seconds
    before it raises BoardUnavailable. Payloads whose writer died before committing them expire after orphan_seconds.

    Every operation is idempotent, so that it can be retried after a lost reply. Every atomic write is a single
    script (relaxd/board/lua).
    """


class AsyncBoard(AsynchronousFace, CoordinatorSide, StageSide, TrainerSide):
    """The board for one event loop: its operations are awaited, `close` included.

    An operation that is cancelled may have taken effect or not, as after a lost reply. Columns are encoded and decoded
    in the event loop: to move megabytes, use a Board in a thread.
    """


logger = logging.getLogger(__name__)
T = TypeVar("T")

TAKE_SECONDS = 0.5
"""Maximum time that one read waits for new groups, in seconds; it may delay a pause or stop of the worker."""
BATCH = 256
"""Maximum number of groups in one commit."""
OUTAGE_PAUSE_SECONDS = 0.5
MAX_THREADS = 16
"""Maximum threads of a worker whose concurrency changes. Its `process` returns futures, so threads only start work."""


@dataclass(frozen=True)
class Drop:
    """Result of a stage's work that drops the group, with the reason by which the board counts drops."""

    reason: DropReason
    filtered: bool = False
    """True if the algorithm filtered the group, False if it failed."""
    detail: str = ""
    """Error text of the drop, for people."""

    @property
    def counts(self) -> DropKind:
        """Which count of consecutive drops this drop increases."""
        return "filtered" if self.filtered else "failed"


Result: TypeAlias = Mapping[str, Column] | Drop
"""Result of a stage's work on a group: the columns that the stage writes, or a drop."""

Process: TypeAlias = Callable[[Delivery, dict[str, Column]], Result | Future[Result]]


@dataclass(frozen=True)
class _Finished:
    """Finished work on a group, to be committed, dropped or (after an error or cancellation) handed back."""

    group_id: str
    outcome: Result | BaseException
    worked: tuple[int, int]
    """Start and end of the work on the group, in microseconds of Unix time."""
    span: Span = INVALID_SPAN
    """Span of the work, to which log lines refer."""


class StageWorker:
    """Runs `process(delivery, columns)` on the groups of a stage, at most `concurrency` at once.

    `process` runs in a thread, inside the stage's span of the group's trace, and gets the columns that the stage needs
    (or `columns`, if given). It returns the columns to commit, a Drop, or a future of either. If it raises, the group
    is nacked, and the attempt counts towards board.max_deliveries; a cancelled future is nacked without counting.
    With `in_order`, one thread runs `process`, on groups in the order in which they were taken.
    While Redis is unavailable, work continues and results wait. If a thread of the worker itself fails, the worker
    stops and calls `on_failure` with the reason, in that thread.
    """

    def __init__(
        self,
        board: Board,
        stage: str,
        consumer: str,
        process: Process,
        *,
        concurrency: int | Callable[[], int],
        columns: Sequence[str] | None = None,
        in_order: bool = False,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._board = board
        self._on_failure = on_failure
        self._stage = stage
        self._consumer = consumer
        self._client = board.client_attributes(consumer)
        self._process = process
        self._concurrency = concurrency if callable(concurrency) else lambda: concurrency
        self._columns = tuple(columns or board.needs(stage))
        self._held: dict[str, Delivery] = {}
        self._unfinished: set[str] = set()
        self._finished: queue.SimpleQueue[_Finished | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._paused = self._draining = False
        self._stop = threading.Event()
        self._outage = False
        self._done = 0
        most = concurrency if isinstance(concurrency, int) else MAX_THREADS
        self._pool = ThreadPoolExecutor(1 if in_order else most, thread_name_prefix=stage)
        self._threads = {
            name: threading.Thread(target=self._guarded, args=(loop,), name=f"{stage}-{name}", daemon=True)
            for name, loop in (("read", self._read), ("commit", self._commit), ("renew", self._renew))
        }

    @property
    def held(self) -> int:
        """Number of groups that this worker holds now."""
        return len(self._held)

    def hold(self, group_id: str) -> Delivery | None:
        """Return the newest delivery of a group that this worker holds; None if it doesn't hold the group."""
        return self._held.get(group_id)

    @property
    def done(self) -> int:
        """Number of groups that this worker committed or dropped."""
        return self._done

    def start(self) -> None:
        """Start the worker's threads, which take groups unless the worker was paused before."""
        for thread in self._threads.values():
            thread.start()

    def pause(self) -> None:
        """Stop taking groups. Work on held groups continues."""
        self._set_paused(True)

    def resume(self) -> None:
        """Take groups again after `pause`, unless the worker drains."""
        self._set_paused(False)

    def look_for_room(self) -> None:
        """Check now, not only at the next regular check, whether the allowed number of held groups has risen."""
        with self._changed:
            self._changed.notify_all()

    def drain(self, seconds: float) -> int:
        """Stop taking groups for good, wait up to `seconds` for held groups to finish, hand back the rest, and stop.

        Returns the number of groups that were handed back.
        """
        with self._changed:
            self._draining = self._paused = True  # a later `resume` doesn't undo the drain
            self._changed.notify_all()
        deadline = time.monotonic() + seconds
        with waiting(f"the groups that stage {self._stage} holds, to drain"), self._changed:
            while self._held and time.monotonic() < deadline and not self._stop.is_set():
                self._changed.wait(min(0.2, max(0.0, deadline - time.monotonic())))
        return self.stop()

    def stop(self) -> int:
        """Commit finished groups, hand back the rest and end the threads. Returns the number of groups handed back."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._finished.put(None)
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            left = list(self._held.values())
            self._held.clear()
        try:
            self._board.nack(self._stage, self._consumer, left)
        except BoardError as error:
            logger.warning(
                "%d held groups could not be handed back and wait for their leases to expire: %s", len(left), error
            )
        return len(left)

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                free = 0 if self._paused else self._concurrency() - len(self._held)
                if free <= 0:
                    self._changed.wait(TAKE_SECONDS)  # idle: it has as many groups as it takes
                    continue
            take = partial(self._board.take, self._stage, self._consumer, count=free, block_seconds=TAKE_SECONDS)
            taken = self._retry(take)
            if taken:
                self._admit(taken)

    def _admit(self, taken: list[Delivery]) -> None:
        """Load the columns of taken groups and start work on the groups; if paused or stopped, hand them back."""
        if self._paused or self._stop.is_set():
            self._retry(lambda: self._board.nack(self._stage, self._consumer, taken))
            return
        with self._changed:
            # A group whose lease expired may be redelivered while work on it runs: it continues under the new hold.
            fresh = [delivery for delivery in taken if delivery.group_id not in self._unfinished]
            self._unfinished.update(delivery.group_id for delivery in fresh)
            self._held.update({delivery.group_id: delivery for delivery in taken})
        for delivery, columns in self._load(fresh):
            if columns is None:  # closed meanwhile
                self._unfinished.discard(delivery.group_id)
                self._forget([delivery])
            else:
                self._pool.submit(self._work, delivery, columns)

    def _load(self, deliveries: list[Delivery]) -> list[tuple[Delivery, dict[str, Column] | None]]:
        """Load the columns of several groups. If the columns of one are corrupt, only that group fails."""
        try:
            loaded = self._retry(lambda: self._board.load(deliveries, self._columns))
            return list(zip(deliveries, loaded, strict=True)) if loaded is not None else []
        except BoardError as error:
            if len(deliveries) > 1:
                return [pair for delivery in deliveries for pair in self._load([delivery])]
            now = microseconds()
            self._finished.put(_Finished(deliveries[0].group_id, error, (now, now)))
            return []

    # --- working ------------------------------------------------------------------------------------------------

    def _work(self, delivery: Delivery, columns: dict[str, Column]) -> None:
        started_at = microseconds()
        waited_seconds = StageTime(delivery.enqueued_at, started_at, started_at).queue_seconds
        labels = {"relaxd.run_id": self._board.run_id, "relaxd.stage": self._stage}
        span = open_stage_span(
            self._stage,
            delivery.group_id,
            delivery.trace,
            waited_seconds=waited_seconds,
            started_at=started_at,
            attributes={**self._client, "relaxd.attempt": delivery.attempt},
        )
        record("queue.wait_seconds", waited_seconds, labels, span)

        def finish(outcome: Result | BaseException) -> None:
            ended = microseconds()
            if isinstance(outcome, BaseException):
                span.record_exception(outcome)
                span.set_status(trace.StatusCode.ERROR, str(outcome))
            span.end(ended * 1000)
            record("stage.seconds", (ended - started_at) / MICROSECONDS, labels, span)
            self._finished.put(_Finished(delivery.group_id, outcome, (started_at, ended), span))

        def finish_future(future: Future[Result]) -> None:
            if future.cancelled():
                finish(CancelledError())
            else:
                finish(future.exception() or future.result())

        with trace.use_span(span):
            try:
                result = self._process(delivery, columns)
            except Exception as error:  # anything a reward or engine raises fails the group, not the worker
                finish(error)
                return
        if isinstance(result, Future):
            result.add_done_callback(finish_future)
        else:
            finish(result)

    # --- committing ---------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        while True:
            batch = [self._finished.get()]
            while len(batch) < BATCH and not self._finished.empty():
                batch.append(self._finished.get())
            self._settle([item for item in batch if item is not None])
            if None in batch:
                return

    def _settle(self, finished: list[_Finished]) -> None:
        """Commit or drop groups whose work is finished; hand back those whose work failed or was cancelled."""
        with self._changed:
            held = [(self._held[one.group_id], one) for one in finished]
            for delivery, one in held:
                delivery.worked = one.worked
            self._unfinished.difference_update(one.group_id for one in finished)
        commits = [(delivery, one.outcome) for delivery, one in held if isinstance(one.outcome, Mapping)]
        settled = self._commit_columns(commits)
        for delivery, one in held:
            outcome = one.outcome
            if isinstance(outcome, Drop):
                drop = partial(self._board.drop, reason=outcome.reason, counts=outcome.counts, detail=outcome.detail)
                dropped = self._retry(partial(drop, delivery))
                self._done += bool(dropped)
                settled += [delivery] if dropped is not None else []
            elif isinstance(outcome, CancelledError):
                settled += self._nack(delivery, failed=False)
            elif not isinstance(outcome, Mapping):
                with trace.use_span(one.span):
                    logger.error(
                        "stage %s failed on group %s (attempt %d): %s",
                        *(self._stage, delivery.group_id, delivery.attempt, outcome),
                        exc_info=outcome if isinstance(outcome, BaseException) else None,
                    )
                settled += self._nack(delivery, failed=True)
        self._forget(settled)

    def _commit_columns(self, commits: list[tuple[Delivery, Mapping[str, Column]]]) -> list[Delivery]:
        """Commit the columns of several groups. If those of one can't be stored, only that group fails.

        Returns the deliveries whose holds have ended.
        """
        try:
            results = self._retry(lambda: self._board.commit(commits))
        except (ColumnError, TooLate, ValueError) as error:
            if len(commits) > 1:
                return [settled for commit in commits for settled in self._commit_columns([commit])]
            delivery = commits[0][0]
            if isinstance(error, ColumnsTooLarge):  # another attempt would be as large
                logger.error("stage %s drops group %s: %s", self._stage, delivery.group_id, error)
                dropped = self._retry(partial(self._board.drop, delivery, reason=DropReason.TOO_LARGE))
                return [delivery] if dropped is not None else []
            logger.error(
                "stage %s: the columns of group %s cannot be stored: %s", self._stage, delivery.group_id, error
            )
            return self._nack(delivery, failed=True)
        self._done += sum(results or ())
        return [delivery for delivery, _ in commits] if results is not None else []

    def _nack(self, delivery: Delivery, *, failed: bool) -> list[Delivery]:
        nacked = self._retry(lambda: self._board.nack(self._stage, self._consumer, [delivery], failed=failed))
        return [delivery] if nacked is not None else []

    # --- holding ------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        while not self._stop.wait(self._board.limits.lease_seconds / 4):  # idle: renews the leases
            with self._changed:
                deliveries = list(self._held.values())
            held = self._retry(partial(self._board.renew, self._stage, self._consumer, deliveries))
            if held is not None and len(held) < len(deliveries):
                logger.debug("stage %s: other consumers took over %d groups", self._stage, len(deliveries) - len(held))

    def _forget(self, deliveries: Sequence[Delivery]) -> None:
        """Forget deliveries whose holds have ended, but no newer delivery of the same group."""
        with self._changed:
            for delivery in deliveries:
                if self._held.get(delivery.group_id) is delivery:
                    del self._held[delivery.group_id]
            self._changed.notify_all()

    def _set_paused(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused or self._draining
            self._changed.notify_all()

    def _retry(self, operation: Callable[[], T]) -> T | None:
        """Retry an operation while Redis is unavailable or lacks the run. Returns None if the worker is stopped."""
        with ExitStack() as waits:
            while True:
                try:
                    result = operation()
                except (BoardUnavailable, RunMissing) as error:
                    if not self._outage:
                        self._outage = True
                        logger.warning("stage %s waits for the board: %s", self._stage, error)
                        waits.enter_context(waiting(f"the board, for stage {self._stage}", on="redis"))
                    if self._stop.wait(OUTAGE_PAUSE_SECONDS):  # named: above
                        return None
                else:
                    if self._outage:
                        self._outage = False
                        logger.warning("stage %s: the board is available again", self._stage)
                    return result

    def _guarded(self, loop: Callable[[], None]) -> None:
        """Run the loop of one of the worker's threads. If it fails, stop all of them and call `on_failure`.

        The leases then expire, and other workers take the groups.
        """
        try:
            loop()
        except Exception as error:
            logger.exception("the worker of stage %s failed", self._stage)
            self._stop.set()
            self._on_failure(f"the worker of stage {self._stage} failed: {type(error).__name__}: {error}")
