"""A pipeline's bubble equals that of a simulation that knows only which pass waits for which."""

import pytest

from services.trainer.batch.step_plan import MicroBatchRound, bubble_share, group_size, schedule_length


def passes_until_the_end(micro_batches: int, stages: int, chunks: int) -> int:
    """When the last stage is done, in passes through a chunk; empty ones take no time."""
    padded = max(micro_batches, stages)
    size = group_size(padded, stages)
    groups = [range(begin, min(begin + size, padded)) for begin in range(0, padded, size)]
    order = [(number, chunk) for group in groups for chunk in range(chunks) for number in group]
    ready: dict[tuple[int, int, int], int] = {}
    free = [0] * stages
    left = {stage: list(order) for stage in range(stages)}
    while any(left.values()):
        for stage in range(stages):
            number, chunk = left[stage][0] if left[stage] else (0, 0)
            before = (number, chunk, stage - 1) if stage else (number, chunk - 1, stages - 1)
            if not left[stage] or (before[1] >= 0 and before not in ready):
                continue
            free[stage] = max(free[stage], ready.get(before, 0)) + (number < micro_batches)
            ready[number, chunk, stage] = free[stage]
            left[stage].pop(0)
    return free[-1]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_bubble_is_what_a_clock_finds(stages: int, chunks: int) -> None:
    for count in range(1, 4 * stages + 2):
        entry = MicroBatchRound((((),) * count,))
        taken = passes_until_the_end(count, stages, chunks)
        assert bubble_share([entry], stages, chunks) == pytest.approx(1 - chunks * count / taken), count
        if count >= stages:
            assert bubble_share([entry], stages, chunks) == pytest.approx((stages - 1) / (chunks * count + stages - 1))


def test_two_schedules_have_two_bubbles() -> None:
    entries = [MicroBatchRound((((),) * count,)) for count in (10, 6)]
    assert bubble_share(entries, 2, 2) == pytest.approx(2 * 0.5 / (16 + 2 * 0.5))


def test_schedules_are_a_multiple_of_the_stages_that_have_chunks() -> None:
    assert [schedule_length(stages, 2) for stages in (2, 4, 8)] == [20, 60, 144]
    assert schedule_length(8) == 140


def test_few_micro_batches_go_through_a_chunk_at_once() -> None:
    assert [group_size(count, 2) for count in (2, 3, 4, 5, 6, 7)] == [2, 3, 2, 3, 2, 4]
    assert [group_size(count, 4) for count in (4, 8, 9, 11)] == [4, 4, 5, 6]
    with pytest.raises(ValueError, match="3 micro-batches are fewer than the 4 stages"):
        group_size(3, 4)
