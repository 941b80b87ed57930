"""Errors and tokens of a service that the user runs at reward.address."""

import os

from relaxd.config import RewardConfig
from services.reward.worker_enclosure import MissingVariableError


class UnreachableError(Exception):
    """The service doesn't answer, or is too busy to: the call may be repeated."""

    def __init__(self, message: str, *, retry_after: float = 0.0, starting: bool = False) -> None:
        """`retry_after`: seconds until the service wants the next call; 0 if it doesn't say.

        `starting` is true of a service that has not failed, but is not there yet.
        """
        super().__init__(message)
        self.retry_after = retry_after
        self.starting = starting


class MismatchError(Exception):
    """The service answers, but not in relaxd's protocol."""


def authorization(config: RewardConfig) -> dict[str, str]:
    """Return the headers with the token of reward.address_token; empty without a token. Raises MissingVariableError."""
    name = config.address_token
    if not name:
        return {}
    if not (token := os.environ.get(name, "").strip()):
        raise MissingVariableError(
            f"reward.address_token names {name}, not set in the reward service's environment: set it where that "
            "service is started"
        )
    return {"authorization": f"Bearer {token}"}
