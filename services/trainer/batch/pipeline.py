"""Lengths of pipeline schedules. Each fills and drains once, while some stages idle."""

from collections.abc import Iterable

from services.trainer.batch.step_plan import MicroBatchRound

SCHEDULE = 20
"""Micro-batches of a schedule for each stage but the last, while a step fills. A stage then idles for a 21st of it."""


def schedule_length(stages: int, chunks: int = 1) -> int:
    """Return the micro-batches on each data-parallel rank with which training starts before a step is full.

    With several chunks it is a multiple of `stages`, with which they go best through chunks (`group_size`).
    """
    length = max(1, SCHEDULE * (stages - 1))
    return length if chunks == 1 else length + -length % stages


def group_size(micro_batches: int, stages: int) -> int:
    """Return the number of micro-batches that a stage takes through one chunk before the next chunk.

    The minimum at which no stage waits for another one: the number of stages, also in the last group.
    Megatron refuses others. More of them take more memory.

    Raises:
        ValueError: there are fewer micro-batches than stages.
    """
    for size in range(stages, micro_batches + 1):
        rest = micro_batches % size
        if rest == 0 or rest >= stages:
            return size
    raise ValueError(f"{micro_batches} micro-batches are fewer than the {stages} stages that chunks need")


def bubble_share(rounds: Iterable[MicroBatchRound], stages: int, chunks: int = 1) -> float:
    """Return the share of a stage's time in which it waits for its pipeline to fill and drain.

    A schedule of m micro-batches on p stages with v chunks each takes as long as m + (p - 1) / v of them (arXiv
    2104.04473, section 2.2), so that the share is (p - 1) / (v m + p - 1). If m is less than p, the second chunk's turn
    comes only when the first micro-batch has been through the first chunks of all stages, and so on. Each round is one
    schedule.
    """
    idle = total = 0
    for entry in rounds:
        count = len(entry.micro_batches[0])
        passes = chunks * max(count, stages) + min(count, stages) - 1  # of a micro-batch through a chunk
        idle += passes - chunks * count
        total += passes
    return idle / total if total else 0.0
