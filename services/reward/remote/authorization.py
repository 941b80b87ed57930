"""The token that a service at reward.address gets."""

import os

from relaxd.config import RewardConfig
from services.reward.environment import MissingVariableError


def authorization(config: RewardConfig) -> dict[str, str]:
    """Return the headers with the token of reward.address_token; none without it. Raises MissingVariableError."""
    name = config.address_token
    if not name:
        return {}
    if not (token := os.environ.get(name, "").strip()):
        raise MissingVariableError(
            f"reward.address_token names {name}, not set in the reward service's environment: set it where that "
            "service is started"
        )
    return {"authorization": f"Bearer {token}"}
