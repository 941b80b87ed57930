"""The autoscaler under a load that changes: a real coordinator, Redis and launcher, scripted engines and trainer."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.config import RunConfig
from relaxd.config.write_toml import dump
from relaxd.local import stack
from relaxd.local.programs import MANY_ROLLOUTS
from relaxd.local.state_folder import StateFolder
from relaxd.roles import ROLLOUT
from relaxd.tools.rehearsal.assumptions import Scale, rehearsed
from relaxd.tools.rehearsal.stand_ins import write_stand_in
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from relaxd.v1.scaling_pb2 import AutoscaleDecision
from tests.kit.waiting import PATIENCE, wait_until

# 32 samples a step: 16 s of the one worker while "light" is there, when two engines are too many.
REWARD = """
import time
from pathlib import Path
from relaxd.tools.rehearsal.stand_ins import scripted

def gated(sample):
    if Path(__file__).with_name("light").exists():
        time.sleep(0.5)
    return scripted(sample, 0.5)
"""
PROMISED = 2
CONFIG = {
    "run": {"steps": 100},
    "model": {"path": "not/here"},
    "data": {"source": "addition", "max_prompt_tokens": 64},
    "reward": {"name": "math"},
    # A step's 2,048 tokens take two engines 2.6 s and four 1.3 s, like the trainer.
    "rollout": {"engine": "sglang", "samples_per_prompt": 4, "max_new_tokens": 64, "max_running_samples": 8},
    "trainer": {"groups_per_step": 8, "micro_batch_tokens": 4096},
    "rehearsal": {
        "median_tokens": 64,
        "spread": 0.0,
        "tokens_per_second": 400.0,
        "sample_tokens_per_second": 100.0,
        "train_tokens_per_second": 2000.0,
        "update_seconds": 0.1,
        "sync_seconds": 0.05,
    },
    "autoscale": {
        "mode": "on",
        "min_replicas": PROMISED,
        "max_replicas": 6,
        "in_seconds": 20.0,
        "in_cooldown_seconds": 20.0,
    },
}
OUT_SECONDS = 60.0
SETTLE_SECONDS = 75.0
"""Longer than any rule's window and cooldown."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoordinatorClient]:
    """Yield the coordinator of a run that trains with as many engines as are promised."""
    (tmp_path / "gated_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    folder = StateFolder(tmp_path / "state")
    plan = stack.make_plan(folder, port=0, replicas={ROLLOUT: PROMISED}, stop_with_parent=True, grace_seconds=3)
    for spec in (plan.templates[ROLLOUT], *(one for one in plan.services if one.role == ROLLOUT)):
        spec.command = [sys.executable, "-m", MANY_ROLLOUTS, "1", "1", str(tmp_path / "calls.txt")]
        spec.environment |= {"CUDA_VISIBLE_DEVICES": ""}
    model = write_stand_in(tmp_path / "stand-in")
    config = rehearsed(
        RunConfig.model_validate(CONFIG), Scale(PROMISED, time=1, payload=1), model=model, folder=tmp_path / "runs"
    )
    reward = config.reward.model_copy(update={"name": "gated_reward:gated", "settings": {}, "workers": 1})
    try:
        stack.up(folder, plan, print)
        with CoordinatorClient(plan.coordinator, plan.stack) as coordinator:
            coordinator.start_run(dump(config.model_copy(update={"reward": reward})), "elastic")
            wait_until(lambda: coordinator.run().step >= 1, "a step", 120)
            wait_until(lambda: serving(coordinator) == PROMISED, "all promised engines", 120)
            yield coordinator
            print(coordinator.autoscaler())  # shown if the test fails
    finally:
        stack.down(folder)


def serving(coordinator: CoordinatorClient) -> int:
    """Return the number of engines that serve."""
    there = [one for one in coordinator.replicas() if one.registration.role == ROLLOUT]
    return sum(one.status.state == REPLICA_STATE_READY and one.status.weights.term > 0 for one in there)


def decisions(coordinator: CoordinatorClient) -> list[AutoscaleDecision]:
    """Return the decisions so far, the oldest first."""
    return list(reversed(coordinator.autoscaler().decisions))


@pytest.mark.night
@pytest.mark.timeout(900)
def test_engines_follow_a_load_that_changes(run: CoordinatorClient, tmp_path: Path) -> None:
    numbers: list[int] = []

    def watch(condition: Callable[[], bool], what: str, seconds: float) -> float:
        """Wait for a condition and return the seconds; the engines that serve are counted meanwhile."""
        begun = time.monotonic()

        def look() -> bool:
            numbers.append(serving(run))
            return condition()

        wait_until(look, what, seconds)
        return time.monotonic() - begun

    def watch_on() -> None:
        """Watch for as long as what would swing does so."""
        until = time.monotonic() + SETTLE_SECONDS
        watch(lambda: time.monotonic() > until, "a while", 2 * SETTLE_SECONDS)

    first = watch(lambda: serving(run) > PROMISED, "more engines", OUT_SECONDS * PATIENCE)
    watch_on()
    ways = [one.wanted_replicas > one.replicas for one in decisions(run)]
    assert ways == sorted(ways, reverse=True), decisions(run)  # perhaps too many, then fewer; none are added again
    assert serving(run) > PROMISED

    (tmp_path / "light").touch()
    many = len(decisions(run))
    back = watch(lambda: serving(run) == PROMISED, "as few engines as are promised", 240)
    watch_on()
    assert all(one.wanted_replicas == one.replicas - 1 for one in decisions(run)[many:]), decisions(run)

    (tmp_path / "light").unlink()
    again = watch(lambda: serving(run) > PROMISED, "more engines again", (OUT_SECONDS + 16) * PATIENCE)  # a light step
    print(f"out after {first:.0f} s, in after {back:.0f} s, out again after {again:.0f} s; engines: {changes(numbers)}")
    assert min(numbers) >= PROMISED


def changes(numbers: list[int]) -> list[int]:
    """Return numbers without repetitions in a row."""
    return [number for before, number in zip([0, *numbers], numbers, strict=False) if number != before]
