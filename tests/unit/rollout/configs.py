"""Configurations of runs."""

from typing import Any

from relaxd.config import RunConfig


def run_config(*, pause: str = "in_place", **rollout: Any) -> RunConfig:
    """A run with these settings in [rollout]."""
    return RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": "model"},
            "data": {"source": "addition"},
            "reward": {"name": "addition"},
            "rollout": rollout,
            "weights": {"pause": pause},
        }
    )
