"""The examples of images, video and sound: a tiny model learns what they show, and from blank ones nothing."""

import json
from pathlib import Path

import pytest

from relaxd.cli.preparing.first_steps import example
from relaxd.tools.digit_pictures import DIGITS
from relaxd.tools.moving_dots import SIDES
from relaxd.tools.tone_pitches import PITCHES
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary


def accuracies(folder: Path, steps: int) -> tuple[float, float]:
    """Return the accuracy of the first 512 answers, and that of the last 1,280."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]
    assert len(rewards) == steps
    return sum(rewards[:2]) / 2, sum(rewards[-5:]) / 5


@pytest.mark.night
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("file", "steps", "answers"),
    [("digits.toml", 36, DIGITS), ("dots.toml", 60, len(SIDES)), ("pitches.toml", 60, PITCHES)],
    ids=["digits", "dots", "pitches"],
)
def test_a_model_learns_what_it_gets(workplace: Workplace, file: str, steps: int, answers: int) -> None:
    models = {"RELAXD_MODELS": str(workplace.folder / "models")}
    code, output = workplace.relaxd("run", str(example(file)), "--run-id", "seen", timeout=1200, **models)
    assert code == 0, output
    folder = workplace.folder / "runs" / "seen"
    check_books(read_summary(folder), steps, groups_per_step=32)
    before, after = accuracies(folder, steps)
    assert before < 1.5 / answers
    assert after > 0.6
    assert read_summary(folder)["reward_after"] > 0.6  # of items that it wasn't trained on

    words = ("--run-id", "blank", "--data.settings.blank", "true")
    code, output = workplace.relaxd("run", str(example(file)), *words, timeout=1200, **models)
    assert code == 0, output
    before, after = accuracies(workplace.folder / "runs" / "blank", steps)
    assert before < 1.5 / answers
    assert after < 1.5 / answers
