"""Services of a rehearsal."""

from pathlib import Path

import pytest

from relaxd.config.load_toml import load_file
from relaxd.local.programs import MANY_ROLLOUTS
from relaxd.local.state_folder import StateFolder
from relaxd.roles import ROLLOUT
from relaxd.tools.rehearsal.assumptions import Scale
from relaxd.tools.rehearsal.rehearse import REPLICAS_IN_PROCESS, rehearsal_plan


def test_added_rollout_replicas_are_scripted_and_see_no_real_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAXD_REDIS_MAXMEMORY", "0")  # the plan sets it
    config = load_file(Path("benchmarks/shapes/math.toml"))
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"tensor_parallel": 16})})
    plan = rehearsal_plan(StateFolder(tmp_path), config, Scale(rollout=REPLICAS_IN_PROCESS + 3, time=1.0, payload=1))
    first = [spec for spec in plan.services if spec.role == ROLLOUT]
    commands = [spec.command[1:] for spec in (*first, plan.templates[ROLLOUT])]
    assert [words[:4] for words in commands] == [
        ["-m", MANY_ROLLOUTS, count, "16"] for count in (str(REPLICAS_IN_PROCESS), "3", "1")
    ]
    assert len({words[4] for words in commands}) == 3
    assert all(Path(words[4]).parent.is_dir() for words in commands)
    assert {spec.environment["CUDA_VISIBLE_DEVICES"] for spec in (*first, plan.templates[ROLLOUT])} == {""}
