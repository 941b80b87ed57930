"""What the command line tells a person when something can't be done."""


class CliError(Exception):
    """One clear sentence about what went wrong, and where possible what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
