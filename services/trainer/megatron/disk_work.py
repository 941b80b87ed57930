"""Ranks waiting for each other's work on disks: outside of collectives, for as long as it gets on.

A collective has a deadline (`trainer.collective_timeout_seconds`) that suits processes which compute side by side.
Reading or writing a checkpoint of 100 GB takes as long as the disk takes. So nobody waits for files in a collective:
each rank notes in the rendezvous store what it has done, and looks there for the others. No process group knows of this
waiting, so that no watchdog of NCCL ends it either.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from relaxd.retry import Backoff

LOOK_SECONDS = 1.0
"""How often a rank notes what it has done, and what it waits for is looked at."""
BACKOFF = Backoff(first_seconds=0.001, max_seconds=0.05)
"""Between two questions whether all are done."""

Progress = Callable[[int], None]
"""Called by work with the bytes that it has done since the last call."""


class DiskWorkFailed(RuntimeError):
    """Another rank could not do its part; the message says which one and why."""


class DiskStalled(TimeoutError):
    """Another rank got nothing done for too long; the message says which one, and at what."""


@dataclass
class _Seen:
    """What was last seen of another rank's part."""

    since: float
    """When it changed."""
    done: int | None = None
    """Its bytes; None before it has begun."""


class DiskWork:
    """This rank's share of the work that ranks do together on disks. Used by the training thread only."""

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
        """Meet the other ranks in a store. All ranks make one at the same time.

        Args:
            store: shared by all ranks, for nothing else.
            rank: this rank.
            size: how many there are.
            stall_seconds: a rank that gets nothing done for so long is given up.
            clock: seconds that only grow.
            sleep: waits so many seconds.
        """
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._sleep = sleep
        self._turn = 0
        self.tell: Callable[[str], None] = lambda text: None
        """Called about every LOOK_SECONDS while there is work, with what is done, or what is waited for."""

    @contextmanager
    def together(self, what: str) -> Iterator[Progress]:
        """Do this rank's part of some work in the block, then wait until the other ranks have done theirs.

        All ranks call it, in the same order; a rank that has no part has an empty block. Inside, no collective may be
        waited for. A rank whose block raises doesn't wait.

        Args:
            what: the work, for people, such as "reading checkpoint step-000040".

        Yields:
            What the block calls with the bytes that it has done, so that the others see that it gets on.

        Raises:
            DiskWorkFailed: another rank's block raised, or the store is gone, and so rank 0.
            DiskStalled: another rank got nothing done for stall_seconds.
        """
        self._turn += 1
        try:
            with self._reachable(what):
                self._note(0)
            yield self._progress(what)
        except BaseException as error:
            with contextlib.suppress(DiskWorkFailed), self._reachable(what):
                self._end(f"{type(error).__name__}: {error}")
            raise
        with self._reachable(what):
            self._end("")
            self._await_others(what)
            self._forget()

    def _progress(self, what: str) -> Progress:
        done, noted = 0, self._clock()

        def progress(count: int) -> None:
            nonlocal done, noted
            done += count
            if self._clock() - noted >= LOOK_SECONDS:
                noted = self._clock()
                with self._reachable(what):
                    self._note(done)
                self.tell(f"{what}: {_amount(done)}")

        return progress

    def _await_others(self, what: str) -> None:
        pending = {other: _Seen(self._clock()) for other in self._others}
        waits, looked = 0, self._clock()
        while pending:
            if self._store.check([self._end_key(other) for other in pending]) or self._clock() - looked >= LOOK_SECONDS:
                looked = self._clock()
                self._look(what, pending)
            else:
                waits += 1
                self._sleep(BACKOFF.pause(waits))

    def _look(self, what: str, pending: dict[int, _Seen]) -> None:
        """Take ranks that are done out of `pending`. Raises DiskWorkFailed, DiskStalled."""
        now = self._clock()
        for other, seen in list(pending.items()):
            if self._store.check([self._end_key(other)]):
                if failure := self._store.get(self._end_key(other)).decode():
                    raise DiskWorkFailed(f"rank {other} failed at {what}: {failure}")
                del pending[other]
                continue
            begun = self._store.check([self._key(other)])
            done = int(self._store.get(self._key(other))) if begun else None
            if done != seen.done:
                pending[other] = _Seen(now, done)
            elif now - seen.since >= self._stall_seconds:
                raise DiskStalled(
                    f"{what}: rank {other}, which {_state(done)}, got nothing done for {now - seen.since:.0f} s "
                    f"(trainer.disk_stall_seconds = {self._stall_seconds:g})"
                )
        if pending:
            self.tell(
                f"{what}: waiting for "
                + ", ".join(f"rank {other}, which {_state(seen.done)}" for other, seen in pending.items())
            )

    def _note(self, done: int) -> None:
        if self._others:
            self._store.set(self._key(self._rank), str(done))

    def _end(self, failure: str) -> None:
        if self._others:
            self._store.set(self._end_key(self._rank), failure)

    def _forget(self) -> None:
        """Remove what this rank noted in the turn before: every rank has ended this one, and so has left that one."""
        if self._others and self._turn > 1:
            self._store.delete_key(self._key(self._rank, self._turn - 1))
            self._store.delete_key(self._end_key(self._rank, self._turn - 1))

    def _key(self, rank: int, turn: int = 0) -> str:
        return f"{turn or self._turn}/{rank}"

    def _end_key(self, rank: int, turn: int = 0) -> str:
        return f"{self._key(rank, turn)}/end"

    @contextmanager
    def _reachable(self, what: str) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise DiskWorkFailed(f"rank 0, which has the store, is gone in the middle of {what}: {error}") from error


def _state(done: int | None) -> str:
    return "has not begun" if done is None else f"has done {_amount(done)}"


def _amount(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
