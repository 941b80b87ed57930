"""On-policy distillation, with a teacher whose replica is killed in the middle."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import Workplace
from tests.e2e.test_run import check_books, read_summary
from tests.kit.models import make_tiny_model

STEPS = 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_teacher_loses_nothing_and_every_token_has_its_word(workplace: Workplace, tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", seed=7, num_hidden_layers=3)
    made = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        made.get_input_embeddings().weight.mul_(10)  # a random model finds all tokens nearly as likely
    made.save_pretrained(teacher)
    run = workplace.start(
        *("run", "tiny.toml", "--run.steps", str(STEPS), "--eval.prompts", "0", "--run-id", "taught"),
        *("--algorithm.name", "opd", "--roles.teacher.model", str(teacher), "--trainer.optimizer.lr", "1e-2"),
    )
    workplace.kill_in_step(run, 2, "teacher")

    folder = workplace.folder / "runs" / "taught"
    check_books(read_summary(folder), STEPS)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[0]["teacher_kl"] > 0.1  # else it would not matter what the teacher says
    assert "queue_teacher_seconds" in steps[-1]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = Counter(group for entry in ledger for group in entry["plan"]["groups"])
    assert set(trained.values()) == {1}
    recorded = load_file(folder / "steps" / f"step-{STEPS:06d}.safetensors")
    for group in ledger[-1]["plan"]["groups"]:
        columns = {
            name: recorded[f"{group}/{name}"]
            for name in ("advantages", "rollout_logprobs", "teacher_logprobs", "loss_mask")
        }
        expected = (columns["teacher_logprobs"] - columns["rollout_logprobs"]) * columns["loss_mask"]
        np.testing.assert_allclose(columns["advantages"], expected, atol=1e-5)
