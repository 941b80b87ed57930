"""The Python client of the coordinator, and the command line's only way to call services. Its errors are what the
command line prints.
"""


class CliError(Exception):
    """A message that says what is wrong, and optionally a hint what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NotFoundError(CliError):
    """A call names something that does not exist."""
