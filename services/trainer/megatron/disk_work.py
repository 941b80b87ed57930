"""Waiting for other ranks' disk I/O, outside of collectives and for as long as it makes progress.

Collectives have a deadline (`trainer.collective_timeout_seconds`) that suits computation, but reading or writing a
checkpoint of 100 GB may take much longer. So no rank waits for files in a collective: each rank publishes its progress
in the rendezvous store and polls that of the others. NCCL's watchdog doesn't see this wait, and doesn't abort it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from relaxd.text import byte_amount
from relaxd.waiting import Backoff

PROGRESS_SECONDS = 1.0
"""Seconds between publications of this rank's disk progress, and between checks of other ranks' progress."""
BACKOFF = Backoff(first_seconds=0.001, max_seconds=0.05)
"""Backoff between polls for the end of other ranks' disk work."""

Progress = Callable[[int], None]
"""Callback that disk work calls with the number of bytes processed since the last call."""


class DiskWorkFailed(RuntimeError):
    """Another rank failed at its part of a common disk operation."""


class DiskStalled(TimeoutError):
    """Another rank's disk work made no progress for trainer.disk_stall_seconds."""


class DiskRefused(RuntimeError):
    """The disk refused a collective write, for instance because it is full. No rank fails because of it."""


class DiskWork:
    """Publishes this rank's disk progress, and waits for the disk work of other ranks.

    Only the training thread may use it, except for `tell`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        stall_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connect to the other ranks. All ranks create a `DiskWork` together.

        Args:
            store: store shared by all ranks, used for nothing else.
            rank: this rank.
            size: number of ranks.
            stall_seconds: longest time without progress before waiting for a rank fails.
            clock: monotonic clock, in seconds.
            sleep: sleeps for the given seconds.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._others = [other for other in range(size) if other != rank]
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._sleep = sleep
        self._turn = 0
        self.report: Callable[[str], None] = lambda text: None
        """Called about every PROGRESS_SECONDS during disk work, with a text that names progress or awaited ranks."""

    @contextmanager
    def all_ranks(self, work: str) -> Iterator[Progress]:
        """Do this rank's part of the work in the block, then wait until all ranks have finished theirs.

        All ranks call it, in the same order, with an empty block if they have nothing to do. The block must not wait
        for a collective. If it raises, this rank doesn't wait.

        Args:
            work: description for logs, such as "reading checkpoint step-000040".

        Yields:
            A callback for the block to report processed bytes, which other ranks see as progress.

        Raises:
            DiskWorkFailed: another rank's block raised, or rank 0, which hosts the store, is gone.
            DiskStalled: another rank made no progress for stall_seconds.
        """
        self._turn += 1
        try:
            with self._reachable(work):
                self._publish(0)
            yield self._progress(work)
        except BaseException as error:
            with contextlib.suppress(DiskWorkFailed), self._reachable(work):
                self._end(f"{type(error).__name__}: {error}")
            raise
        with self._reachable(work):
            self._end("")
            self._await_others(work)
            self._delete_keys()

    def tell(self, work: str, text: str) -> None:
        """Report the end of this rank's background work to rank 0. Any thread may call it, once.

        This needs no disk, because the disk may be full.

        Args:
            work: a name that all ranks use for this work only.
            text: the report.
        """
        self._store.set(self._told_key(work, self._rank), text)
        self._store.add(f"{work}/told", 1)

    def results(self, work: str) -> list[str] | None:
        """Return each rank's report on background work, or None until all ranks have reported. Doesn't wait."""
        if self._store.add(f"{work}/told", 0) < self._size:
            return None
        return [self._store.get(self._told_key(work, rank)).decode() for rank in range(self._size)]

    def silent(self, work: str) -> list[int]:
        """Return the ranks that haven't reported the end of background work."""
        return [rank for rank in range(self._size) if not self._store.check([self._told_key(work, rank)])]

    def forget(self, work: str) -> None:
        """Clear this rank's report. Collective: call after `results` on every rank."""
        self._store.delete_key(self._told_key(work, self._rank))
        if self._rank == 0:
            self._store.delete_key(f"{work}/told")

    def _progress(self, work: str) -> Progress:
        done, noted = 0, self._clock()

        def progress(count: int) -> None:
            nonlocal done, noted
            done += count
            if self._clock() - noted >= PROGRESS_SECONDS:
                noted = self._clock()
                with self._reachable(work):
                    self._publish(done)
                self.report(f"{work}: {byte_amount(done)}")

        return progress

    def _await_others(self, work: str) -> None:
        pending: dict[int, tuple[float, int | None]] = {other: (self._clock(), None) for other in self._others}
        waits, looked = 0, self._clock()
        while pending:
            if (
                self._store.check([self._end_key(other) for other in pending])
                or self._clock() - looked >= PROGRESS_SECONDS
            ):
                looked = self._clock()
                self._check(work, pending)
            else:
                waits += 1
                self._sleep(BACKOFF.pause(waits))

    def _check(self, work: str, pending: dict[int, tuple[float, int | None]]) -> None:
        """Remove finished ranks from `pending`; note the progress of the others. Raises DiskWorkFailed, DiskStalled.

        `pending`: by rank, the time of the last progress and the processed bytes (None before the rank's start).
        """
        now = self._clock()
        for other, (since, seen) in list(pending.items()):
            if self._store.check([self._end_key(other)]):
                if failure := self._store.get(self._end_key(other)).decode():
                    raise DiskWorkFailed(f"rank {other} failed while {work}: {failure}")
                del pending[other]
                continue
            begun = self._store.check([self._key(other)])
            done = int(self._store.get(self._key(other))) if begun else None
            if done != seen:
                pending[other] = now, done
            elif now - since >= self._stall_seconds:
                raise DiskStalled(
                    f"{work}: rank {other}, which {_state(done)}, made no progress for {now - since:.0f} s "
                    f"(trainer.disk_stall_seconds = {self._stall_seconds:g})"
                )
        if pending:
            self.report(
                f"{work}: waiting for "
                + ", ".join(f"rank {other}, which {_state(done)}" for other, (_, done) in pending.items())
            )

    def _publish(self, done: int) -> None:
        if self._others:
            self._store.set(self._key(self._rank), str(done))

    def _end(self, failure: str) -> None:
        if self._others:
            self._store.set(self._end_key(self._rank), failure)

    def _delete_keys(self) -> None:
        """Delete this rank's store keys of the previous disk work, which no rank reads any more."""
        if self._others and self._turn > 1:
            self._store.delete_key(self._key(self._rank, self._turn - 1))
            self._store.delete_key(self._end_key(self._rank, self._turn - 1))

    def _key(self, rank: int, turn: int = 0) -> str:
        return f"{turn or self._turn}/{rank}"

    def _end_key(self, rank: int, turn: int = 0) -> str:
        return f"{self._key(rank, turn)}/end"

    def _told_key(self, work: str, rank: int) -> str:
        return f"{work}/told/{rank}"

    @contextmanager
    def _reachable(self, work: str) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise DiskWorkFailed(f"{work}: rank 0, which hosts the store, is gone: {error}") from error


def _state(done: int | None) -> str:
    return "has not started" if done is None else f"has processed {byte_amount(done)}"
