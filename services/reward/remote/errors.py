"""Errors of a remote reward service."""


class UnreachableError(Exception):
    """The service doesn't answer, or is too busy to: the call may be repeated."""


class MismatchError(Exception):
    """The service answers, but doesn't speak what relaxd speaks."""
