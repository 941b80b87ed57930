"""Errors of a remote reward service."""


class UnreachableError(Exception):
    """The service doesn't answer, or is too busy to: the call may be repeated."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        """`retry_after` is in how many seconds the service wants to be called again, if it says so."""
        super().__init__(message)
        self.retry_after = retry_after


class MismatchError(Exception):
    """The service answers, but doesn't speak what relaxd speaks."""
