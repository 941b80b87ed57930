"""Curricula in whole runs: solved prompts are left out, also by the next coordinator, and a run may end by rule."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.config import RunConfig
from relaxd.data.curriculum.prompt_record import PromptRecord
from relaxd.data.prompt_checks import CHECKED
from relaxd.run_folder import GROUPS
from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import Cluster

pytestmark = pytest.mark.slow

OWN = """
def score(sample):
    return sample.metadata["reward"]

def keep(samples):
    assert [one.reward for one in samples] == [samples[0].metadata["reward"]] * 4
    return samples[0].reward >= 0
"""


def start(
    cluster: Cluster, rewards: list[float], steps: int, different: int = 0, deduplicate: bool = False, **curriculum: Any
) -> None:
    """Start a run whose prompts always get these rewards. Only so many are different, by default all."""
    (cluster.folder / "own.py").write_text(OWN)
    different = different or len(rewards)
    rows = [{"prompt": f"{index % different} + 1", "reward": reward} for index, reward in enumerate(rewards)]
    (cluster.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cluster.judges()
    cluster.trainer(PEER_STEP_SECONDS="0.2")
    cluster.rollout("rollout-1")
    cluster.start_when_up(
        "run",
        data__source="files",
        data__path=str(cluster.folder / "prompts.jsonl"),
        data__deduplicate=deduplicate,
        reward__name=f"{cluster.folder}/own.py:score",
        run__steps=steps,
        **{f"data.curriculum__{name}": value for name, value in curriculum.items()},
    )


def fates(run: pb.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.folder) / GROUPS).read_text().splitlines()]


def test_solved_prompts_are_left_out_also_by_the_next_coordinator(cluster: Cluster) -> None:
    rewards = [1.0] * 8 + [0.5] * 6 + [-1.0] * 2
    start(cluster, rewards, 24, max_pass_rate=0.9, tries=1, retest=0.0, filter=f"{cluster.folder}/own.py:keep")
    cluster.until_step(5)
    cluster.kill("coordinator")
    cluster.coordinator()
    cluster.until_step(9)
    # A step is there before the coordinator has counted its groups, or read the folder after its restart.
    cluster.until("the solved prompts", lambda: any("8 solved" in line for line in cluster.run().wait.evidence))
    cluster.until("their metric", lambda: cluster.run().metrics["prompts_solved"] == 8)
    run = cluster.until_state(pb.RUN_STATE_STOPPED)
    assert (run.reason, run.step) == ("completed", 24)
    lines = fates(run)
    visits = Counter(line["index"] for line in lines)
    assert (
        max(visits[index] for index in range(8)) <= 2
    )  # the next epoch may begin before the first one's end is scored
    assert min(visits[index] for index in range(8, 14)) >= 5
    assert {line["index"] for line in lines if line.get("reason") == "filtered"} == {14, 15}
    assert run.groups.dropped_by_reason == {"filtered": visits[14] + visits[15]}
    record = PromptRecord(16, RunConfig.model_validate_json(run.config_json).data.curriculum)
    record.observe(lines)
    metrics = json.loads((Path(run.folder) / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["prompts_solved"] == record.solved == 8
    assert metrics["prompts_pass_rate_5"] == 6


def test_a_run_without_prompts_that_it_can_learn_from_ends_by_rule(cluster: Cluster) -> None:
    start(cluster, [1.0] * 12, 50, max_pass_rate=0.9, tries=1, exhausted="end")
    run = cluster.until_state(pb.RUN_STATE_STOPPED)
    assert run.outcome == pb.RUN_OUTCOME_STOPPED
    assert run.reason.startswith("the curriculum is exhausted: ")
    assert "of 12 prompts have a pass rate from 0.0 to 0.9 or are yet to be tried, fewer than a step's 4" in run.reason
    assert 2 <= run.step < 10


def test_a_large_file_gives_no_prompt_twice_also_by_the_next_coordinator(cluster: Cluster) -> None:
    start(cluster, [0.5] * (CHECKED + 100), 13, different=60, deduplicate=True)
    cluster.until_step(5)
    cluster.kill("coordinator")
    cluster.coordinator()
    cluster.until_step(8)
    cluster.until("the repeated prompts", lambda: cluster.run().metrics["prompts_repeated"] > 0)
    run = cluster.until_state(pb.RUN_STATE_STOPPED)
    assert (run.reason, run.step) == ("completed", 13)
    trained = [line["index"] % 60 for line in fates(run) if "reason" not in line]
    assert len(trained) == len(set(trained)) == 13 * 4
    order = np.random.default_rng((0, 0)).permutation(CHECKED + 100)  # as the seed's order is made
    _, first = np.unique(order % 60, return_index=True)
    assert {line["index"] for line in fates(run)} <= set(order[first].tolist())
