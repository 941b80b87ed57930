"""Which steps are profiled, and what one rank records."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from relaxd.config import RunConfig
from relaxd.rpc.errors import FailedPrecondition, Unavailable
from services.trainer.loop.step_profiler import ProfileOptions, ProfilePlan, step_profiler, trace_path
from tests.kit.profiles import operations


def make_config(**profile: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 6},
            "model": {"path": "model"},
            "data": {"source": "addition"},
            "reward": {"name": "addition"},
            "trainer": {"ranks": 2, "profile": profile},
        }
    )


def test_plan_has_the_configured_and_the_requested_steps() -> None:
    plan = ProfilePlan(make_config(steps=[2, 4], ranks=[1]))
    options = ProfileOptions(ranks=(0,), stacks=True)
    with pytest.raises(Unavailable, match="no step has begun"):
        plan.request(1, options)
    assert plan.begin(1) is None
    with pytest.raises(FailedPrecondition, match="steps is 6, but only 5 of the run's 6 have not begun"):
        plan.request(6, options)
    assert plan.begin(2) == ProfileOptions(ranks=(1,))
    assert plan.begin(2) is None, "a step that starts over is recorded already"
    with pytest.raises(FailedPrecondition, match=r"step 4 will be recorded already, .* again once step 4 has begun"):
        plan.request(2, options)
    assert plan.request(1, options) == range(3, 4)
    with pytest.raises(FailedPrecondition, match="step 3 will be recorded already"):
        plan.request(1, ProfileOptions(ranks=(1,)))
    assert [plan.begin(step) for step in (3, 4, 5, 6)] == [options, ProfileOptions(ranks=(1,)), None, None]


@pytest.mark.parametrize("ranks", [[], [2], [0, 5]])
def test_ranks_that_are_not_there_are_refused(ranks: list[int]) -> None:
    with pytest.raises(ValidationError, match=r"it must list ranks from 0 to trainer\.ranks - 1 = 1"):
        make_config(steps=[1], ranks=ranks)


def test_only_the_ranks_to_record_write(tmp_path: Path) -> None:
    config, options = make_config(), ProfileOptions(ranks=(1,))
    for rank in (0, 1):
        profiler = step_profiler(config, rank, tmp_path)
        profiler.begin(7, options)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.end()
        profiler.end()
    assert not trace_path(tmp_path, 7, 0).exists()
    assert operations(trace_path(tmp_path, 7, 1))["aten::mm"] == 1


def test_a_disk_that_refuses_a_profile_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "file"
    folder.touch()
    profiler = step_profiler(make_config(), 0, folder)
    profiler.begin(7, ProfileOptions(ranks=(0,)))
    profiler.end()
    assert "is not written" in caplog.text


def test_memory_is_not_recorded_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = step_profiler(make_config(memory=True), 0, tmp_path)
    assert not profiler.keeps_memory
    assert "no memory is recorded" in caplog.text
