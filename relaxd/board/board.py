"""The sample board of a run."""

from relaxd.board.sides.coordinator import CoordinatorSide
from relaxd.board.sides.stage import StageSide
from relaxd.board.sides.trainer import TrainerSide


class Board(CoordinatorSide, StageSide, TrainerSide):
    """A run's groups, stages, counters and step ledger in Redis. Thread-safe; synchronous.

    `Board(redis_url, run_id, stages, limits, *, timeout_seconds=5.0, retry_seconds=10.0, orphan_seconds=60.0)`:
    timeout_seconds limits each wait for Redis. While Redis is unavailable, an operation is retried for retry_seconds
    before it raises BoardUnavailable. Payloads whose writer died before committing them expire after orphan_seconds.

    Every operation is idempotent, so that it can be retried after a lost reply. Every write that must be atomic is one
    script (relaxd/board/lua).
    """
