"""The example of a tool that shows images: a tiny model learns where to look."""

import json
from pathlib import Path

import pytest

from relaxd.cli.preparing.first_steps import example
from relaxd.tools.digit_pictures import DIGITS
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary

STEPS = 40


def lines_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward_mean" in line]


def mean(lines: list[dict[str, float]], name: str = "reward_mean") -> float:
    """Return the mean of a metric."""
    return sum(line[name] for line in lines) / len(lines)


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_a_model_learns_where_to_look(workplace: Workplace) -> None:
    models = {"RELAXD_MODELS": str(workplace.folder / "models")}
    code, output = workplace.relaxd("run", str(example("zoom.toml")), "--run-id", "seen", timeout=1800, **models)
    assert code == 0, output
    folder = workplace.folder / "runs" / "seen"
    check_books(read_summary(folder), STEPS, groups_per_step=32)
    lines = lines_of(folder)
    assert len(lines) == STEPS
    assert mean(lines[:2]) < 0.7  # it reads, but looks at random halves
    assert mean(lines[-5:]) > 0.75
    assert read_summary(folder)["reward_after"] > 0.85  # of pictures that it wasn't trained on
    # Engine and trainer have seen the same pictures in the same places, or their log-probs would differ.
    gaps = [line["logprob_difference_max"] for line in lines if "logprob_difference_max" in line]
    assert gaps
    assert max(gaps) < 1e-4

    words = ("--run-id", "blank", "--data.settings.blank", "true")
    code, output = workplace.relaxd("run", str(example("zoom.toml")), *words, timeout=1800, **models)
    assert code == 0, output
    assert mean(lines_of(workplace.folder / "runs" / "blank")[-5:]) < 1.5 / DIGITS
