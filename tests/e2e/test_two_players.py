"""The example of self-play: a tiny model plays against itself, and gets better against another opponent."""

import shutil
from pathlib import Path

import pytest

from relaxd.cli.preparing.first_steps import example
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary

STEPS = 60


def win_share(folder: Path, step: int) -> float:
    """Return the share of games that the model of a step won against the best opponent, of 0.75 that it could."""
    (found,) = (one for one in read_summary(folder)["evaluations"] if one["step"] == step)
    return float(found["eval/best/reward"])


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_a_model_that_plays_against_itself_beats_another_opponent_more_often(workplace: Workplace) -> None:
    (workplace.folder / "examples").mkdir()
    shutil.copy(example("nim.jsonl"), workplace.folder / "examples")
    models = {"RELAXD_MODELS": str(workplace.folder / "models")}
    code, output = workplace.relaxd("model", "fetch", "game-beginner", timeout=600, **models)
    assert code == 0, output
    path = str(example("two-players.toml"))
    code, output = workplace.relaxd("run", path, "--run-id", "played", timeout=1200, **models)
    assert code == 0, output
    folder = workplace.folder / "runs" / "played"
    check_books(read_summary(folder), STEPS, groups_per_step=8)
    before, after = win_share(folder, 0), win_share(folder, STEPS)
    assert before < 0.35
    assert after > before + 0.05  # it was 0.2 where this was measured; 128 games tell it to 0.06
