"""Lengths of pipeline schedules. Each fills and drains once, while some stages idle."""

from collections.abc import Iterable

from services.trainer.batch.step_plan import MicroBatchRound

SCHEDULE = 20
"""Micro-batches of a schedule for each stage but the last, while a step fills. A stage then idles for a 21st of it."""


def schedule_length(stages: int) -> int:
    """Return the micro-batches on each data-parallel rank with which training starts before a step is full."""
    return max(1, SCHEDULE * (stages - 1))


def bubble_share(rounds: Iterable[MicroBatchRound], stages: int) -> float:
    """Return the share of a stage's time in which it waits for its pipeline to fill and drain.

    A schedule of m micro-batches on p stages takes as long as m + p - 1 of them (arXiv 2104.04473, section 2.2). Each
    round is one schedule.
    """
    idle = total = 0
    for entry in rounds:
        idle += stages - 1
        total += len(entry.micro_batches[0]) + stages - 1
    return idle / total if total else 0.0
