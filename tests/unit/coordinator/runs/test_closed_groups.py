"""pass@k and shares of all scored groups, against counting every draw of k samples."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.coordinator.runs.closed_groups import ClosedGroups, metrics_of


def line(samples: int, right: int, step: int = 0, **more: Any) -> dict[str, Any]:
    counted = {"samples": samples, "right": right} if samples else {}
    return counted | more | ({"step": step} if step else {"reason": "zero_variance"})


STEP_1 = [line(4, 4, equal_rewards=1), line(0, 0), line(4, 1, 1), line(4, 2, 1)]
STEP_2 = [line(4, 0, equal_rewards=1), line(2, 1, 2)]


def drawn(n: int, right: int, k: int) -> float:
    """Return pass@k by counting all draws."""
    draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
    return sum(map(any, draws)) / len(draws)


def test_dropped_groups_count_for_the_next_step() -> None:
    groups = ClosedGroups()
    groups.observe([*STEP_1, *STEP_2, line(4, 4, equal_rewards=1)])
    first, second = groups.take(1), groups.take(2)
    assert (first["scored_groups"], second["scored_groups"]) == (3.0, 2.0)
    for k in (1, 2, 4):
        assert first[f"pass_at_{k}"] == pytest.approx((1 + drawn(4, 1, k) + drawn(4, 2, k)) / 3)
    assert second["pass_at_2"] == pytest.approx((0 + 1) / 2)
    assert second["pass_at_4"] == 0.0, "only groups with four samples"
    assert (first["zero_variance_share"], first["all_right_share"], first["all_wrong_share"]) == (1 / 3, 1 / 3, 0)
    assert (second["zero_variance_share"], second["all_right_share"], second["all_wrong_share"]) == (0.5, 0, 0.5)
    assert groups.take(3) == {}
    groups.observe([line(4, 0, 3)])
    assert groups.take(3)["scored_groups"] == 2.0, "one was dropped before"


def test_a_new_coordinator_counts_what_was_closed_since_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*STEP_1, *STEP_2]))
    groups = ClosedGroups()
    groups.load(tmp_path, last_step=1)
    assert groups.take(1) == {}
    expected = metrics_of(Counter({(4, 0, True): 1, (2, 1, False): 1}))
    assert groups.take(2) == expected
