"""What can go wrong on the board."""


class BoardError(Exception):
    """Anything the board refuses; the base of the others."""


class ColumnError(BoardError):
    """A column that cannot be stored, or stored bytes that are not what their header says."""


class ColumnsTooLarge(ColumnError):
    """Columns that take more than board.max_group_bytes."""


class Fenced(BoardError):
    """The caller's term is over: another process has taken its place. It must stop writing."""


class StepConflict(BoardError):
    """The step is not the last one plus one, or its plan names a group that is not open."""


class RunExists(BoardError):
    """The run is on the board already, with other settings."""


class RunMissing(BoardError):
    """The run is not on the board: it was never created, or it was deleted."""


class BoardUnavailable(BoardError):
    """Redis could not be reached, after retries. Every operation may be repeated: repeating does no harm."""


class GateClosed(BoardError):
    """Publishing is not allowed now: `limit` and `detail` say why, as in `relaxd.board.types.Admission`."""

    def __init__(self, limit: str, detail: str) -> None:
        super().__init__(f"the gate is closed ({limit}): {detail}")
        self.limit = limit
        self.detail = detail
