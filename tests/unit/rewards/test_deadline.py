"""The clocks of rewards' deadlines count the time in which the process itself ran."""

import asyncio
from collections.abc import Sequence

import pytest

from relaxd.sandbox.running_time import LATE_SECONDS, LOOK_SECONDS, RunningClock, ran
from services.reward.deadline import Deadline
from tests.kit.cases import each


@each(
    ("planned", "passed", "counted"),
    [
        (0.5, 0.5, 0.5),
        (0.5, 0.2, 0.2),  # a question to the judge came before the look
        (0.5, 1.4, 1.4),  # a busy machine
        (0.5, 1.6, 0.25),  # stopped for about a second
        (0.5, 3600.0, 0.25),  # a suspended laptop
        (0.1, 60.0, 0.05),
        (0.0, 0.0, 0.0),
    ],
)
def test_what_counts_of_the_time_between_two_looks(planned: float, passed: float, counted: float) -> None:
    assert ran(planned, passed) == pytest.approx(counted)


def test_the_clock_of_a_sandbox_stands_still_with_its_process() -> None:
    now = 100.0
    clock = RunningClock(lambda: now)
    assert clock.plan(3.0) == LOOK_SECONDS
    now += 0.2  # an answer
    assert clock.now() == pytest.approx(100.2)
    now += 30.0  # computing, not waiting
    assert clock.now() == pytest.approx(130.2)
    assert clock.plan(0.1) == pytest.approx(0.1)
    now += 60.0  # stopped during the wait
    assert clock.now() == pytest.approx(130.25)
    now += 1.0
    assert clock.now() == pytest.approx(131.25)


class Machine(asyncio.SelectorEventLoop):
    """An event loop on a clock that a test puts forward: one that sleeps until the next timer, or stands still."""

    def __init__(self, stops: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        self.now = 0.0
        self.stops = list(stops)
        """Stops to come: when they begin, and how long they last."""

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
            if self.stops and self.now >= self.stops[0][0]:
                begin, seconds = self.stops.pop(0)
                self.now = max(self.now, begin + seconds)
        super()._run_once()  # type: ignore[misc]


@each(
    ("limit", "work", "stops", "late"),
    [
        (10.0, 9.0, [], False),
        (10.0, 11.0, [], True),
        (10.0, 9.0, [(4.0, 30.0)], False),  # its answer comes while the process stands still, and is read after it
        (10.0, 45.0, [(4.0, 30.0)], True),  # it ran for 15 s
        (10.0, 9.9, [(9.6, 3600.0)], False),  # shortly before the limit
        (10.0, 100.0, [(2.0, 30.0), (33.0, 30.0), (64.0, 30.0)], False),  # 10 s of work between three stops
        (10.0, 200.0, [(2.0, 30.0), (33.0, 30.0), (64.0, 30.0)], True),
        (0.2, 0.1, [(0.05, 5.0)], False),
        (0.2, 10.0, [(0.05, 5.0)], True),
    ],
)
def test_a_pause_of_the_process_is_not_the_rewards_fault(
    limit: float, work: float, stops: Sequence[tuple[float, float]], late: bool
) -> None:
    machine = Machine(stops)

    async def score() -> bool:
        done = asyncio.Event()
        machine.call_at(work, done.set)
        try:
            async with Deadline(limit):
                await done.wait()
        except TimeoutError:
            return True
        return False

    try:
        assert machine.run_until_complete(score()) == late
    finally:
        machine.close()


def test_a_deadline_ends_although_every_look_is_late() -> None:
    machine = Machine([(at * 10.0, 10.0) for at in range(10_000)])

    async def hang() -> float:
        with pytest.raises(TimeoutError):
            async with Deadline(10.0):
                await asyncio.Event().wait()
        return machine.now

    try:
        assert machine.run_until_complete(hang()) < 100 * (LOOK_SECONDS + LATE_SECONDS + 10.0)
    finally:
        machine.close()


@pytest.mark.night
def test_the_judges_time_does_not_count() -> None:
    machine = Machine([])

    async def ask() -> float:
        async with Deadline(10.0) as deadline:
            await asyncio.sleep(3.0)
            deadline.pause()
            deadline.pause()
            await asyncio.sleep(60.0)
            deadline.resume()
            await asyncio.sleep(60.0)
            deadline.resume()
            await asyncio.sleep(4.0)
            return deadline.seconds

    try:
        assert machine.run_until_complete(ask()) == pytest.approx(7.0)
    finally:
        machine.close()
