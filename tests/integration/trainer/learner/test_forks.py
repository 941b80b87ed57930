"""Forks: a run's recorded steps, trained again under other settings."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.config import RunConfig
from relaxd.run_folder import REWARDS, read_lines
from services.trainer.batch.step_plan import step_file_path
from services.trainer.offline.fork import check, fork
from services.trainer.offline.program_parts import OfflineError
from tests.integration.trainer.learner.updates_kit import config_of, prepare_rewarded_run, prepare_run
from tests.integration.trainer.service_kit import several_updates
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.megatron_world import shut_down

pytestmark = pytest.mark.usefixtures("alone")
ONE_UPDATE = {"mini_batches": 1, "epochs": 1}
FASTER = {"lr": 4e-2, "epsilon": 1e-3}
SAME = ("loss", "grad_norm", "lr", "optimizer_steps", "policy_drift_ess", "clip_fraction", "weights_checksum")


def record(job: RunJob) -> list[Any]:
    """A run on the board. Returns its ledger; the folder has what commands read."""
    trained, config, folder = run_job(job), job.config, job.folder
    shut_down()
    (folder / "config.json").write_text(config.model_dump_json())
    ledger: list[Any] = trained["ledger"]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in ledger))
    return ledger


def train(original: Path, config: RunConfig, out: Path) -> list[dict[str, Any]]:
    """Fork both steps. Returns the fork's metrics."""
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(config.model_dump_json())
    assert fork(original, out, 0, 2) == {"steps": 2}
    shut_down()
    return list(read_lines(out / "metrics.jsonl"))


def with_optimizer(config: RunConfig, **optimizer: float) -> RunConfig:
    return RunConfig.model_validate(
        config.model_dump(mode="json") | {"trainer": config.trainer.model_dump(mode="json") | {"optimizer": optimizer}}
    )


def test_a_fork_without_changes_is_the_run_bit_for_bit(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    config = config_of(tiny_qwen3)
    ledger = record(prepare_run(redis_url, 1, config, tmp_path / "run"))
    lines = train(tmp_path / "run", config, tmp_path / "fork")
    assert [line["step"] for line in lines] == [1, 2]
    for line, entry in zip(lines, ledger, strict=True):
        assert {name: line[name] for name in SAME} == {name: entry.metrics[name] for name in SAME}
        assert line["reward_mean"] == entry.metrics["reward_mean"]


def test_a_fork_with_another_learning_rate_is_a_run_with_it(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    """Although its advantages and old log-probs follow from the weights, which are others from step 2 on."""
    config = several_updates(tiny_qwen3, {"old_logprobs": "current", "kl_reward_coef": 0.05})
    faster = with_optimizer(config, **FASTER)
    record(prepare_rewarded_run(redis_url, 1, config, tmp_path / "run"))
    expected = record(prepare_rewarded_run(redis_url, 2, faster, tmp_path / "faster"))
    lines = train(tmp_path / "run", faster, tmp_path / "fork")
    for line, entry in zip(lines, expected, strict=True):
        for name in ("loss", "grad_norm", "lr", "policy_drift_ess", "clip_fraction"):
            assert line[name] == pytest.approx(entry.metrics[name], rel=1e-4, abs=1e-6), name
    assert lines[1]["policy_drift_ess"] < 0.9, "the answers are another policy's"


def test_new_rewards_make_new_advantages(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    """A fork is the run, bit for bit, that had these rewards and their advantages, by GRPO's formula."""
    config = config_of(tiny_qwen3, **ONE_UPDATE)
    record(prepare_run(redis_url, 1, config, tmp_path / "run"))
    rewards = {f"g{number}": [0.0, float(number)] for number in range(1, 9)}
    given: dict[str, Any] = {}
    for name, (low, high) in rewards.items():
        advantage = (high - low) / 2 / (np.std([low, high], ddof=1) + config.algorithm.std_epsilon)
        given[name] = {"rewards": [low, high], "advantage": advantage, "least_advantage": -advantage}
    expected = record(prepare_run(redis_url, 2, config, tmp_path / "other", **given))
    (tmp_path / "fork").mkdir()
    columns = [{"group": name, "reward": reward, "reward_parts": {}} for name, reward in rewards.items()]
    (tmp_path / "fork" / REWARDS).write_text("".join(json.dumps(one) + "\n" for one in columns))
    other = config.model_copy(update={"reward": config.reward.model_copy(update={"timeout_seconds": 3.0})})
    lines = train(tmp_path / "run", other, tmp_path / "fork")
    for line, entry in zip(lines, expected, strict=True):
        assert {name: line[name] for name in SAME} == {name: entry.metrics[name] for name in SAME}
        assert line["reward_mean"] == entry.metrics["reward_mean"]


def test_what_was_not_recorded_is_refused(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    config = config_of(tiny_qwen3, **ONE_UPDATE)
    record(prepare_run(redis_url, 1, config, tmp_path / "run"))
    roles = {"teacher": {"model": str(tiny_qwen3)}}
    taught = RunConfig.model_validate(
        config.model_dump(mode="json") | {"roles": roles, "algorithm": {"name": "grpo", "distill_coef": 0.5}}
    )
    with pytest.raises(OfflineError, match="step 1 has no column teacher_logprobs, which these settings need"):
        train(tmp_path / "run", taught, tmp_path / "fork")
    shut_down()
    with pytest.raises(OfflineError, match=r"no intact checkpoint of step 1: .* one of these checkpoints: none"):
        check(tmp_path / "run", 1, 2)
    step_file_path(tmp_path / "run", 2).unlink()
    with pytest.raises(OfflineError, match=r"keep_step_files = \"always\" keeps all"):
        check(tmp_path / "run", 0, 2)
