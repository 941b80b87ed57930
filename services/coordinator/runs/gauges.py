"""Metrics of the active run's board."""

from relaxd import telemetry
from relaxd.board import AsyncBoard


async def record_board(board: AsyncBoard) -> None:
    """Record group counts and the queue length of every stage. Raises BoardError."""
    run = {"relaxd.run_id": board.run_id}
    counts = await board.counts()
    for name, value in (("published", counts.published), ("open", counts.open), ("trained", counts.trained)):
        telemetry.record(f"groups.{name}", value, run)
    for reason, dropped in counts.dropped_by_reason.items():
        telemetry.record("groups.dropped", dropped, {**run, "relaxd.reason": reason})
    for queue in await board.queues():
        stage = {**run, "relaxd.stage": queue.stage}
        telemetry.record("queue.waiting", queue.waiting, stage)
        telemetry.record("queue.held", queue.held, stage)
