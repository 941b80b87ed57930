"""The sample board of a run: one class for threads and one for an event loop, with the same operations."""

from relaxd.board.connection import AsynchronousFace, BlockingFace
from relaxd.board.sides.coordinator_side import CoordinatorSide
from relaxd.board.sides.stage_side import StageSide
from relaxd.board.sides.trainer_side import TrainerSide


class Board(BlockingFace, CoordinatorSide, StageSide, TrainerSide):
    """A run's groups, stages, counters and step ledger in Redis. Thread-safe; its operations block.

    `Board(redis_url, run_id, stages, limits, *, timeout_seconds=5.0, retry_seconds=10.0, orphan_seconds=60.0)`:
    timeout_seconds limits each wait for Redis. While Redis is unavailable, an operation is retried for retry_seconds
    before it raises BoardUnavailable. Payloads whose writer died before committing them expire after orphan_seconds.

    Every operation is idempotent, so that it can be retried after a lost reply. Every atomic write is a single
    script (relaxd/board/lua).
    """


class AsyncBoard(AsynchronousFace, CoordinatorSide, StageSide, TrainerSide):
    """The board for one event loop: its operations are awaited, `close` included.

    An operation that is cancelled may have taken effect or not, as after a lost reply. Columns are encoded and decoded
    in the event loop: to move megabytes, use a Board in a thread.
    """
