"""Answers that a pause in mode "abort" ends: under which weights they are continued, and whether they may be."""

import asyncio

import numpy as np
import pytest

from relaxd.board import Board, NewGroup, StageWorker, stages_for
from relaxd.config import RehearsalConfig
from relaxd.v1 import rollout_pb2
from services.rollout.engines.request_types import Version
from services.rollout.engines.scripted_engine import ScriptedEngine
from services.rollout.service.group_generator import GroupGenerator, Occupancy
from tests.kit.waiting import eventually
from tests.unit.rollout.configs import run_config

LENGTH = 100


@pytest.mark.parametrize(("max_staleness", "versions"), [(0, {1}), (1, {0, 1})])
async def test_what_may_be_continued_depends_on_the_weights_after_the_pause(
    redis_url: str, max_staleness: int, versions: set[int]
) -> None:
    partial = {"enabled": True, "max_staleness": max_staleness, "save_tokens": 8}
    config = run_config(pause="abort", samples_per_prompt=2, max_new_tokens=LENGTH, partial=partial)
    board = Board(redis_url, "run", stages_for(config), config.board)
    board.create(term=1, groups_per_step=1, steps=1)
    board.set_gate(term=1, oldest_version=0, open=True)
    board.publish(term=1, groups=[NewGroup("g", {"prompt_tokens": np.array([5, 6], np.int32), "prompt": {}})])
    rehearsal = RehearsalConfig(median_tokens=LENGTH, spread=0.0, sample_tokens_per_second=500, sync_seconds=0.1)
    engine, occupancy = ScriptedEngine(config.rollout, rehearsal), Occupancy()
    engine.weights = Version(1, 0)
    generator = GroupGenerator(
        config, board, lambda: engine, lambda: worker.resume(), occupancy, lambda group: worker.hold(group)
    )
    worker = StageWorker(board, "rollout", "rollout-1", generator.process, concurrency=lambda: 1)
    worker.start()
    try:
        await eventually(lambda: engine.tokens > 20, "the answers to have begun")
        # As RolloutServicer does it.
        pause = rollout_pb2.PauseGenerationRequest(mode="PAUSE_MODE_ABORT", lease_seconds=60)
        request = rollout_pb2.ReceiveWeightsRequest(pause=pause, resume=True, pause_timeout_seconds=5)
        request.weights.term, request.weights.version = 1, 1
        occupancy.pause(60)
        await engine.receive(request)
        occupancy.resume()
        taken = await asyncio.to_thread(board.take, "reward", "tester", count=1, block_seconds=10.0)
        (columns,) = board.load(taken, ["versions", "continued"])
        assert columns is not None
        assert set(np.asarray(columns["versions"]).tolist()) == versions
        assert np.asarray(columns["continued"]).tolist() == [len(versions) - 1] * 2
    finally:
        await asyncio.to_thread(worker.stop)
        await engine.stop()
        board.close()
