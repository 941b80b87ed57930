"""The example of images: a tiny model learns to read digits, and with grey pictures in their place it doesn't."""

import json
from pathlib import Path

import pytest

from relaxd.cli.preparing.first_steps import example
from relaxd.tools.digit_pictures import DIGITS
from tests.e2e.conftest import Workplace
from tests.e2e.test_run import check_books, read_summary

STEPS = 36


def accuracies(folder: Path) -> tuple[float, float]:
    """Return the accuracy of the first 512 answers, and that of the last 1,280."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]
    assert len(rewards) == STEPS
    return sum(rewards[:2]) / 2, sum(rewards[-5:]) / 5


@pytest.mark.night
@pytest.mark.timeout(2400)
def test_a_model_learns_to_read_what_it_sees(workplace: Workplace) -> None:
    models = {"RELAXD_MODELS": str(workplace.folder / "models")}
    code, output = workplace.relaxd("run", str(example("digits.toml")), "--run-id", "seen", timeout=1200, **models)
    assert code == 0, output
    folder = workplace.folder / "runs" / "seen"
    check_books(read_summary(folder), STEPS, groups_per_step=32)
    before, after = accuracies(folder)
    assert before < 1.5 / DIGITS
    assert after > 0.6
    assert read_summary(folder)["reward_after"] > 0.6  # of pictures that it wasn't trained on

    words = ("--run-id", "blank", "--data.settings.blank", "true")
    code, output = workplace.relaxd("run", str(example("digits.toml")), *words, timeout=1200, **models)
    assert code == 0, output
    before, after = accuracies(workplace.folder / "runs" / "blank")
    assert before < 1.5 / DIGITS
    assert after < 1.5 / DIGITS
