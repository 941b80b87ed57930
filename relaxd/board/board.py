"""The sample board of a run."""

from relaxd.board.coordinator_side import CoordinatorSide
from relaxd.board.stage_side import StageSide
from relaxd.board.trainer_side import TrainerSide


class Board(CoordinatorSide, StageSide, TrainerSide):
    """A run's groups, stages, counters and step ledger in Redis. Thread-safe; synchronous.

    `Board(redis_url, run_id, stages, limits, *, timeout_seconds=5.0, retry_seconds=10.0, orphan_seconds=60.0)`:
    timeout_seconds limits each wait for Redis; retry_seconds is how long an operation is repeated while Redis is away,
    before BoardUnavailable; payloads whose writer died before committing them vanish after orphan_seconds.

    Every operation is idempotent under a lost reply, and every write that must be atomic is one script
    (relaxd/board/lua).
    """
