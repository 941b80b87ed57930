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
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import make_tiny_model
from tests.sglang.environment import CPU_ENVIRONMENT, CPU_OPTIONS, EnvironmentUnavailable, sglang_python

STEPS = 5
SGLANG = """
[algorithm]
name = "opd"

[roles.teacher]
model = "{teacher}"
engine = "sglang"
threads = 1
memory_fraction = 0.3

[roles.teacher.sglang]
{options}
"""


def make_teacher(folder: Path) -> Path:
    """A random model, which finds some tokens likelier than others."""
    teacher = make_tiny_model(folder, seed=7, num_hidden_layers=3)
    made = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        made.get_input_embeddings().weight.mul_(10)
    made.save_pretrained(teacher)
    return teacher


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_killed_teacher_loses_nothing_and_every_token_has_its_word(workplace: Workplace, tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher")
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
        mask, words = (recorded[f"{group}/{name}"] for name in ("loss_mask", "teacher_logprobs"))
        assert mask.any()
        assert np.isfinite(words).all()
        assert (words[mask > 0] < 0).all()
        # OPD takes the student's log-probabilities in the loss, where they are current: no part of it is recorded here.
        assert not recorded[f"{group}/advantages"].any()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_teacher_service_is_asked_about_what_the_engine_finds_likeliest(workplace: Workplace, tmp_path: Path) -> None:
    """Of the first step, whose tokens the initial model wrote: what is compared are both models' likeliest tokens."""
    top_k = 6
    teacher = make_teacher(tmp_path / "teacher")
    words = (
        *("--algorithm.name", "opd", "--algorithm.distill_coef", "0", "--algorithm.distill_loss_coef", "1"),
        *("--algorithm.distill_top_k", str(top_k), "--algorithm.distill_candidates", "union"),
        *("--roles.teacher.model", str(teacher), "--trainer.optimizer.lr", "1e-2", "--board.max_staleness", "0"),
    )
    words = ("run", "tiny.toml", "--run.steps", "3", "--eval.prompts", "0", "--run-id", "taught", *words)
    code, output = workplace.relaxd(*words, timeout=400)
    assert code == 0, output

    folder = workplace.folder / "runs" / "taught"
    check_books(read_summary(folder), 3)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["teacher_kl"] < steps[0]["teacher_kl"]
    recorded = load_file(folder / "steps" / "step-000001.safetensors")
    model = json.loads((folder / "config.json").read_text())["model"]["path"]
    exact = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for name, path in {"student": model, "teacher": teacher}.items()
    }
    seen = 0
    for group in {name.rpartition("/")[0] for name in recorded if name.endswith("/candidates")}:
        tokens, prompt = (recorded[f"{group}/{name}"].astype(np.int64) for name in ("tokens", "prompt_tokens"))
        ids = recorded[f"{group}/candidates"]
        assert ids.shape == (len(tokens), 2 * top_k)
        begin = 0
        for length in recorded[f"{group}/lengths"]:
            own = slice(begin, begin := begin + int(length))
            whole = torch.from_numpy(np.concatenate([prompt, tokens[own]]))
            with torch.inference_mode():
                logprobs = {
                    name: one(whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                    for name, one in exact.items()
                }
            for place, found in enumerate(ids[own]):
                of_teacher, of_student = set(found[:top_k]), set(found[top_k:]) - {-1}
                assert len(of_teacher) == top_k
                assert not of_teacher & of_student
                for name, named in {"teacher": of_teacher, "student": of_teacher | of_student}.items():
                    least = logprobs[name][place].topk(top_k).values[-1]
                    # But for rounding: two tokens may be as likely as each other.
                    likelier = torch.nonzero(logprobs[name][place] > least + 1e-4)[:, 0].tolist()
                    assert set(likelier) <= named
            expected = logprobs["teacher"].gather(-1, torch.from_numpy(ids[own]).long().clamp(min=0)) * (ids[own] >= 0)
            np.testing.assert_allclose(recorded[f"{group}/teacher_candidate_logprobs"][own], expected, atol=1e-4)
            seen += int(length)
    assert seen > 0


@pytest.mark.night
@pytest.mark.timeout(1200)
def test_a_run_is_taught_by_an_sglang_engine(workplace: Workplace, tmp_path: Path) -> None:
    """On services that are up, which `relaxd run` doesn't ask for GPUs. The real SGLang, on a CPU."""
    try:
        python = sglang_python()
    except EnvironmentUnavailable as error:
        pytest.skip(str(error))
    teacher = make_teacher(tmp_path / "teacher")
    options = "\n".join(f"{name} = {json.dumps(value)}" for name, value in CPU_OPTIONS.items())
    with (workplace.folder / "tiny.toml").open("a") as config:
        config.write(SGLANG.format(teacher=teacher, options=options))
    code, output = workplace.relaxd("config", "check", "tiny.toml", CUDA_VISIBLE_DEVICES="")
    assert code != 0
    assert 'roles.teacher.engine = "sglang" needs GPUs, and this machine shows none' in output
    words = ("up", "--port", "0", "--teacher", "1", "--teacher-engine", "sglang")
    code, output = workplace.relaxd(*words, RELAXD_ENGINE_PYTHON=python, **CPU_ENVIRONMENT)
    assert code == 0, output
    words = ("run", "tiny.toml", "--run.steps", "2", "--eval.prompts", "0", "--run-id", "taught")
    code, output = workplace.relaxd(*words, timeout=400)
    assert code == 0, output

    folder = workplace.folder / "runs" / "taught"
    check_books(read_summary(folder), 2)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["teacher_kl"] > 0.1
    recorded = load_file(folder / "steps" / "step-000002.safetensors")
    exact = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    groups = {name.rpartition("/")[0] for name in recorded}
    for group in groups:
        tokens, prompt = (recorded[f"{group}/{name}"].astype(np.int64) for name in ("tokens", "prompt_tokens"))
        begin = 0
        for length in recorded[f"{group}/lengths"]:
            own = slice(begin, begin := begin + int(length))
            whole = torch.from_numpy(np.concatenate([prompt, tokens[own]]))
            with torch.inference_mode():
                logprobs = exact(whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(-1, whole[len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(recorded[f"{group}/teacher_logprobs"][own], expected, atol=1e-4)
