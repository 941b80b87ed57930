"""The Python client of the coordinator, and the command line's only way to call services. The command line prints its
errors.
"""

from relaxd.v1.coordinator_pb2 import Run


class CliError(Exception):
    """Error that commands print: a message that says what is wrong, and an optional hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RunFailedError(CliError):
    """A run has failed. `role` and `instance` name the service that failed it."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"run {run.run_id} failed: {run.reason}")
        self.role = run.failed_role
        self.instance = run.failed_instance


class NotFoundError(CliError):
    """A call names something that doesn't exist, such as an unknown run."""
