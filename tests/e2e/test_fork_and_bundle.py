"""A run whose steps are trained again with other settings, and packed for another machine."""

import shutil
from pathlib import Path

import pytest

from relaxd.run_folder import read_lines
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_receipts

KEPT = """
[trainer.checkpoint]
every = 1
keep = 3
keep_step_files = "always"

[weights]
verify = "always"
"""


def succeed(workplace: Workplace, *words: str) -> str:
    code, output = workplace.relaxd(*words)
    assert code == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_forked_and_packed(workplace: Workplace, tiny_model: Path) -> None:
    place, config = workplace.folder, workplace.folder / "tiny.toml"
    shutil.copytree(tiny_model, place / "model")
    config.write_text(config.read_text().replace(str(tiny_model), str(place / "model")) + KEPT)
    succeed(workplace, "run", "tiny.toml", "--run-id", "original")
    check_receipts(place / "runs/original")
    recorded = [line for line in read_lines(place / "runs/original/metrics.jsonl") if line["step"]]

    # Scored once more by the same reward, the answers have the same advantages, and the weights become the same.
    again = ("--set", "reward.timeout_seconds=31")
    succeed(workplace, "fork", "original", "--step", "1", "--run-id", "scored", *again)
    lines = list(read_lines(place / "runs/scored/metrics.jsonl"))
    assert [line["step"] for line in lines] == [2, 3]
    for line, other in zip(lines, recorded[1:], strict=True):
        for name in ("loss", "grad_norm", "reward_mean", "reward_accuracy", "weights_checksum"):
            assert line[name] == other[name], name

    # Another algorithm begins with the same answers, and its report has both runs.
    output = succeed(workplace, "fork", "original", "--step", "0", "--run-id", "gspo", "--set", "algorithm.name=gspo")
    assert "policy_" in output
    assert "clip_" in output
    lines = list(read_lines(place / "runs/gspo/metrics.jsonl"))
    assert [line["reward_mean"] for line in lines] == [line["reward_mean"] for line in recorded]
    assert lines[-1]["weights_checksum"] != recorded[-1]["weights_checksum"]
    assert "original" in succeed(workplace, "metrics", "gspo")
    succeed(workplace, "report", "gspo")
    assert (place / "runs/gspo/report.html").is_file()

    # Refused before anything is written.
    code, output = workplace.relaxd("fork", "original", "--step", "0", "--set", "model.path=other", "--run-id", "no")
    assert code == 1
    assert "model.path can't be changed by a fork" in output
    assert not (place / "runs/no").exists()

    # Without the run's folder and its model.
    succeed(workplace, "bundle", "original", "--step", "3", "--weights", "--out", "packed.tar.gz")
    for name in ("runs", "model"):
        (place / name).rename(place / f"{name}-elsewhere")
    output = succeed(workplace, "replay", "packed.tar.gz")
    assert 'step 3 of run original, by the configuration in packed.tar.gz: 1 rank, algorithm.name = "grpo"' in output
    assert "from the checkpoint of step" in output
    assert output.count("the same") == 4
