"""A run that has ended goes back to an earlier checkpoint, and is done again from there."""

import json
from pathlib import Path

import pytest

from relaxd.run_folder import checkpoint_steps
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary

SETTINGS = (
    *("--run.steps", "6", "--eval.prompts", "0", "--trainer.checkpoint.every", "2", "--trainer.checkpoint.keep", "3"),
    *("--trainer.checkpoint.export_every", "3"),
)


def lines(folder: Path, name: str) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_back_to_a_checkpoint(workplace: Workplace) -> None:
    code, output = workplace.relaxd("run", "tiny.toml", "--run-id", "r", *SETTINGS)
    assert code == 0, output
    folder = workplace.folder / "runs" / "r"
    first = (folder / "ledger.jsonl").read_text().splitlines()
    code, output = workplace.relaxd("resume", "r", "--from-step", "3")
    assert code == 1
    assert "no checkpoint of step 3: there are checkpoints of steps 2, 4, 6" in output

    code, output = workplace.relaxd("resume", "r", "--from-step", "2", "--reset-moments", "--run.steps", "5")
    assert code == 0, output
    check_books(read_summary(folder), steps=5)
    (aside,) = (folder / "set-aside").iterdir()
    assert f"run r goes on after step 2; what came later is in {aside}" in output.replace("\n", "")
    assert lines(folder, "ledger.jsonl") == lines(folder, "metrics.jsonl") == [1, 2, 3, 4, 5]
    ledger = (folder / "ledger.jsonl").read_text().splitlines()
    assert ledger[:2] == first[:2]
    assert (aside / "ledger.jsonl").read_text().splitlines() == first
    assert checkpoint_steps(aside) == [6, 4]
    assert checkpoint_steps(folder) == [5, 4, 2]
    # The prompts of the steps that were set aside come again, and none twice.
    trained = [group for line in ledger for group in json.loads(line)["plan"]["groups"]]
    assert len({group.partition("~")[0] for group in trained}) == len(trained)
    assert {path.name for path in (folder / "models").iterdir()} == {"step-000003"}
    assert {path.name for path in (aside / "models").iterdir()} == {"step-000003", "step-000006"}
    assert "reset_moments_after = [2]" in (folder / "config.toml").read_text()
