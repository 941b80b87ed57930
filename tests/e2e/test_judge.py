"""A reward that asks a judge, whose replica is killed in the middle."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.asking_reward import REWARD
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import make_tiny_model

STEPS = 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_judge_loses_nothing_and_every_answer_is_judged(workplace: Workplace, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "judge", seed=7, num_hidden_layers=1)
    (workplace.folder / "asking.py").write_text(REWARD)
    run = workplace.start(
        *("run", "tiny.toml", "--run.steps", str(STEPS), "--eval.prompts", "0", "--run-id", "judged"),
        *("--reward.name", "asking:asked", "--roles.judge.model", str(model), "--roles.judge.max_new_tokens", "8"),
        *("--roles.judge.temperature", "1.0", "--roles.judge.threads", "1"),
    )
    workplace.kill_in_step(run, 2, "judge")

    folder = workplace.folder / "runs" / "judged"
    summary = read_summary(folder)
    check_books(summary, STEPS)
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = Counter(group for entry in ledger for group in entry["plan"]["groups"])
    assert set(trained.values()) == {1}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(0 < step["reward_length"] <= 8 * 4 for step in steps)
    assert "reward_failed" not in json.dumps(summary)
