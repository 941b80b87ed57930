"""Errors of the board."""


class BoardError(Exception):
    """Base of the board's errors."""


class ColumnError(BoardError):
    """A column cannot be stored, or stored bytes do not match their header."""


class ColumnsTooLarge(ColumnError):
    """Columns exceed board.max_group_bytes."""


class Fenced(BoardError):
    """The caller's term has ended because another process took over. The caller must stop writing."""


class StepConflict(BoardError):
    """The step is not the last one plus one, or its plan names a group that is not open."""


class LedgerTrimmed(BoardError):
    """The board has trimmed these steps from its ledger; they are in the run's folder. `first`: the ledger's first
    step."""

    def __init__(self, first: int, message: str) -> None:
        super().__init__(message)
        self.first = first


class RunExists(BoardError):
    """The run already exists on the board with other settings."""


class RunMissing(BoardError):
    """The run isn't on the board: it was never created, or was deleted."""


class BoardUnavailable(BoardError):
    """Redis is unavailable, after retries. Repeating the operation is safe."""


class TooLate(BoardError):
    """Writing large payloads took so long that they were given up: they must be written again."""


class GateClosed(BoardError):
    """The gate refuses to publish; `limit` and `detail` are those of `relaxd.board.types.Admission`."""

    def __init__(self, limit: str, detail: str) -> None:
        super().__init__(f"the gate is closed ({limit}): {detail}")
        self.limit = limit
        self.detail = detail
