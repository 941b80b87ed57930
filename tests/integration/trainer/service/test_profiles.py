"""Profiles of the trainer's steps: which steps and ranks have one, and what is in it."""

from pathlib import Path

import grpc
import pytest

from relaxd.run_folder import PROFILES
from relaxd.v1.trainer_pb2 import TrainerProfileRequest
from tests.integration.trainer.service_kit import make_config, trainer_service
from tests.kit.profiles import operations
from tests.kit.waiting import wait_until


@pytest.mark.slow
def test_only_the_asked_steps_and_ranks_have_a_profile(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    profile = {"steps": [1], "ranks": [1]}
    trainer = {"ranks": 2, "tensor_parallel": 2, "profile": profile}
    config = make_config(tiny_qwen3, trainer=trainer, run={"steps": 5}, board={"max_staleness": 9})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        asked = process.trainer.Profile(TrainerProfileRequest(steps=2, stacks=True))
        assert asked.first_step in (2, 3)
        names = [f"trainer-step-{step:06d}-rank0.json.gz" for step in (asked.first_step, asked.first_step + 1)]
        assert asked.paths == [str(tmp_path / PROFILES / name) for name in names]

        for request, code, reason in (
            (TrainerProfileRequest(steps=0), "INVALID_ARGUMENT", "steps: is 0: it must be from 1 to 100"),
            (
                TrainerProfileRequest(steps=1, ranks=[0, 2]),
                "INVALID_ARGUMENT",
                "ranks[1]: is 2: it must be from 0 to 1",
            ),
            (TrainerProfileRequest(steps=5), "FAILED_PRECONDITION", "of the run's 5 have not begun"),
            (TrainerProfileRequest(steps=1, memory=True), "FAILED_PRECONDITION", "run on the CPU"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                process.trainer.Profile(request)
            assert refused.value.code().name == code
            assert reason in refused.value.details()

        feeder.feed(8, 1)
        coordinator.wait_for_version(1, 5)
        wanted = {"trainer-step-000001-rank1.json.gz", *names}
        wait_until(lambda: {path.name for path in (tmp_path / PROFILES).iterdir()} == wanted)
        for name in wanted:
            found = operations(tmp_path / PROFILES / name)
            assert {"TrainRound", "Update", "EndStep", "aten::mm"} <= found.keys()
        stacked = operations(tmp_path / PROFILES / names[0])
        assert any("learner.py" in name for name in stacked)
        assert not any(
            "learner.py" in name for name in operations(tmp_path / PROFILES / "trainer-step-000001-rank1.json.gz")
        )
