"""A colocated run whose judge takes turns with the trainer, too."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.asking_reward import REWARD
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import make_tiny_model

STEPS = 3


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_judge_sleeps_while_the_trainer_trains_and_judges_every_answer(workplace: Workplace, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "judge", seed=7, num_hidden_layers=1)
    (workplace.folder / "asking.py").write_text(REWARD)
    run = workplace.start(
        *("run", "tiny.toml", "--run.steps", str(STEPS), "--eval.prompts", "0", "--run-id", "judged"),
        *("--run.colocate", "true", "--board.max_staleness", "0"),
        *("--reward.name", "asking:asked", "--roles.judge.model", str(model), "--roles.judge.max_new_tokens", "8"),
        *("--roles.judge.temperature", "1.0", "--roles.judge.threads", "1", "--roles.judge.gpu_share", "0.3"),
    )
    output = run.communicate(timeout=300)[0]
    assert run.returncode == 0, output

    folder = workplace.folder / "runs" / "judged"
    summary = read_summary(folder)
    check_books(summary, STEPS)
    assert "reward_failed" not in json.dumps(summary)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(0 < step["reward_length"] <= 8 * 4 for step in steps)
    log = (folder / "logs" / "coordinator.log").read_text()
    assert not re.search("GPU handoff: ", log), log
    # It slept in each step, and nobody asked it then.
    turns = re.findall("INFO judge (asleep|awake):", (folder / "logs" / "judge.log").read_text())
    assert turns[:2] == ["asleep", "awake"]
    assert turns.count("asleep") >= STEPS
    assert "the judge sleeps" not in (folder / "logs" / "reward.log").read_text()
