"""Waiting for other ranks' work on disks: as long as it gets on, and not for ever."""

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from services.trainer.megatron.disk_work import PROGRESS_SECONDS, DiskStalled, DiskWork, DiskWorkFailed

STALL_SECONDS = 60.0


class Time:
    """A clock that moves when somebody sleeps; something may happen then."""

    def __init__(self) -> None:
        self.now = 100.0
        self.happens: Iterator[object] = iter(())

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, PROGRESS_SECONDS)
        next(self.happens, None)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def make(time: Time) -> Callable[[int], DiskWork]:
    store = dist.HashStore()
    return lambda rank: DiskWork(store, rank, 2, STALL_SECONDS, clock=time.clock, sleep=time.sleep)


def working(work: DiskWork, seconds: int, counts: Iterator[int]) -> Iterator[object]:
    """A rank that works for so many seconds, and gets a count of bytes done in each."""
    with work.all_ranks("reading") as progress:
        for _ in range(seconds):
            yield progress(next(counts))


def forever(count: int) -> Iterator[int]:
    while True:
        yield count


def test_it_waits_for_as_long_as_bytes_get_done(make: Callable[[int], DiskWork], time: Time) -> None:
    one, other = make(0), make(1)
    told: list[str] = []
    one.report = told.append
    for turn in range(3):
        began = time.now
        time.happens = working(other, 10_000, forever(10_000_000))
        with one.all_ranks("reading"):
            pass
        assert time.now - began >= 10_000 * PROGRESS_SECONDS, turn
    assert "reading: waiting for rank 1, which has processed 40 MB" in told
    assert "reading: waiting for rank 1, which has processed 90.1 GB" in told


def test_it_gives_up_a_rank_that_gets_nothing_done(make: Callable[[int], DiskWork], time: Time) -> None:
    one, other = make(0), make(1)
    began = time.now
    time.happens = working(other, 10_000, iter([*[5_000_000] * 100, *[0] * 9_900]))
    with (
        pytest.raises(
            DiskStalled, match=r"reading: rank 1, which has processed 500 MB, made no progress for 6\d s .* = 60"
        ),
        one.all_ranks("reading"),
    ):
        pass
    assert 160 <= time.now - began <= 165


def test_it_gives_up_a_rank_that_does_not_come(make: Callable[[int], DiskWork], time: Time) -> None:
    with (
        pytest.raises(DiskStalled, match="rank 1, which has not started, made no progress"),
        make(0).all_ranks("reading"),
    ):
        pass
    assert time.now >= 100.0 + STALL_SECONDS


def test_a_failure_is_known_to_all(make: Callable[[int], DiskWork]) -> None:
    one, other = make(0), make(1)
    with pytest.raises(OSError, match="no space"), other.all_ranks("writing"):
        raise OSError("no space")
    with (
        pytest.raises(DiskWorkFailed, match="rank 1 failed while writing: OSError: no space"),
        one.all_ranks("writing"),
    ):
        pass
    # The ranks may go on from there.
    with pytest.raises(ValueError, match="again"), one.all_ranks("writing"):
        raise ValueError("again")
    with (
        pytest.raises(DiskWorkFailed, match="rank 0 failed while writing: ValueError: again"),
        other.all_ranks("writing"),
    ):
        pass


def test_who_works_alone_says_how_far_it_is(time: Time) -> None:
    told: list[str] = []
    alone = DiskWork(dist.HashStore(), 0, 1, STALL_SECONDS, clock=time.clock, sleep=time.sleep)
    alone.report = told.append
    with alone.all_ranks("reading") as progress:
        for _ in range(3):
            time.now += 0.6
            progress(1_500_000_000)
    assert told == ["reading: 3 GB"]


def test_what_ranks_tell_of_work_in_the_background(make: Callable[[int], DiskWork]) -> None:
    one, other = make(0), make(1)
    other.tell("saving 1", "done")
    assert one.results("saving 1") is None
    assert one.silent("saving 1") == [0]
    one.tell("saving 1", "no space")
    assert one.results("saving 1") == ["no space", "done"]
    assert one.results("saving 2") is None
    one.forget("saving 1")
    other.forget("saving 1")
    assert one.results("saving 1") is None
    assert one.silent("saving 1") == [0, 1]


def test_the_store_does_not_grow(time: Time) -> None:
    store = dist.HashStore()
    one, other = (DiskWork(store, rank, 2, STALL_SECONDS, clock=time.clock, sleep=time.sleep) for rank in range(2))
    kept = set()
    for turn in range(5):
        time.happens = working(other, 3, forever(1))
        with one.all_ranks("reading"):
            pass
        for each in (one, other):
            each.tell(f"saving {turn}", "done")
        for each in (one, other):
            each.forget(f"saving {turn}")
        kept.add(store.num_keys())
    assert max(kept) <= 6
