"""The sample board: groups move from stage to stage through Redis, each trained or dropped exactly once."""

from relaxd.board.board import Board
from relaxd.board.columns import decode_columns, encode_columns
from relaxd.board.connection import passing
from relaxd.board.errors import (
    BoardError,
    BoardUnavailable,
    ColumnError,
    ColumnsTooLarge,
    Fenced,
    GateClosed,
    RunExists,
    RunMissing,
    StepConflict,
)
from relaxd.board.schema import (
    COLUMNS,
    OLD_LOGPROBS,
    REF_LOGPROBS,
    ROUTED_EXPERTS,
    TEACHER_LOGPROBS,
    ColumnSpec,
    trained_columns,
)
from relaxd.board.sizes import RedisMemory, SizeProblem, size_problems, worst_bytes
from relaxd.board.stages import STAGES, TRAIN, Stage, roles_for, stages_for
from relaxd.board.times import GroupTimes, StageTime, microseconds
from relaxd.board.types import (
    JSON,
    Admission,
    Column,
    Counts,
    Delivery,
    DroppedGroup,
    DropReason,
    HeldGroup,
    LedgerEntry,
    NewGroup,
    QueueDepth,
    Retry,
)
from relaxd.board.worker import Drop, StageWorker

__all__ = [
    "COLUMNS",
    "JSON",
    "OLD_LOGPROBS",
    "REF_LOGPROBS",
    "ROUTED_EXPERTS",
    "STAGES",
    "TEACHER_LOGPROBS",
    "TRAIN",
    "Admission",
    "Board",
    "BoardError",
    "BoardUnavailable",
    "Column",
    "ColumnError",
    "ColumnSpec",
    "ColumnsTooLarge",
    "Counts",
    "Delivery",
    "Drop",
    "DropReason",
    "DroppedGroup",
    "Fenced",
    "GateClosed",
    "GroupTimes",
    "HeldGroup",
    "LedgerEntry",
    "NewGroup",
    "QueueDepth",
    "RedisMemory",
    "Retry",
    "RunExists",
    "RunMissing",
    "SizeProblem",
    "Stage",
    "StageTime",
    "StageWorker",
    "StepConflict",
    "decode_columns",
    "encode_columns",
    "microseconds",
    "passing",
    "roles_for",
    "size_problems",
    "stages_for",
    "trained_columns",
    "worst_bytes",
]
