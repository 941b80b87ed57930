"""Weights that a reference service takes over: which ones are in force, and which ones may go."""

from pathlib import Path
from typing import Any

import pytest

from services.trainer.loop.checkpoint_folders import remove_older, weights_after, weights_path

CASES: list[tuple[dict[str, Any], str]] = [
    ({"step": 1, "term": 1}, ""),
    ({"step": 50, "term": 3, "refreshed": ["reference"]}, "step-000050.3"),
    ({"step": 51, "term": 4, "reference": "step-000050.3"}, "step-000050.3"),
    ({"step": 52, "term": 4, "reference": "step-000050.3", "refreshed": ["teacher"]}, "step-000050.3"),
    ({"step": 100, "term": 4, "reference": "step-000050.3", "refreshed": ["reference"]}, "step-000100.4"),
]


@pytest.mark.parametrize(("plan", "name"), CASES)
def test_a_step_leaves_the_weights_that_it_had_or_its_own(plan: dict[str, Any], name: str) -> None:
    assert weights_after(plan) == name


def test_only_older_weights_are_removed(tmp_path: Path) -> None:
    """Not those before, which a replica may still read, nor those of the trainer that has replaced this one."""
    older = ["step-000050.1", "step-000100.1", "step-000150.1.partial"]
    kept = ["step-000100.2", "step-000150.2", "step-000150.3", "step-000200.3.partial", "mine"]
    for name in (*older, *kept):
        weights_path(tmp_path, name).mkdir(parents=True)
    remove_older(tmp_path, "step-000150.2", kept="step-000100.2")
    assert sorted(path.name for path in weights_path(tmp_path, "").iterdir()) == sorted(kept)
