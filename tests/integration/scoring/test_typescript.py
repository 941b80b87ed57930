"""The example of a reward in TypeScript, built and asked as a run would ask it."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from services.reward.remote_scorer import RemoteScorer
from services.reward.worker_pool import Failure
from tests.kit.ports import free_port
from tests.kit.processes import kill
from tests.kit.typescript import build_example


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """The built example."""
    return build_example("reward-typescript", "remote_reward.proto", tmp_path)


@pytest.mark.slow
async def test_a_reward_in_typescript(built):
    assert len((built / "server.ts").read_text().splitlines()) < 60
    address = f"127.0.0.1:{free_port()}"
    server = subprocess.Popen(["node", "build/server.js", address], cwd=built)
    remote = RemoteScorer(RewardConfig(address=address))
    try:
        await remote.start()  # samples wait until it listens
        samples = [RewardInput("1+1?", text, answer="2") for text in ("1 + 1 is\nis 2", "3")]
        right, wrong = await asyncio.wait_for(remote.score(samples), 60)
        assert right == RewardOutput(1.0, {"last_line": pytest.approx(4 / 13)})
        assert wrong == RewardOutput(0.0, {"last_line": 1.0})
        (failed,) = await asyncio.wait_for(remote.score([RewardInput("1+1?", "2")]), 60)
        assert failed == Failure(f"the reward service at {address}: the prompt has no reference answer")
    finally:
        await remote.close()
        kill(server)
