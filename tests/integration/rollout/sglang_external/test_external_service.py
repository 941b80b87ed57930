"""The rollout service as a process with an external SGLang server: calls, the board, and what dies."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from relaxd.board import Board, NewGroup, stages_for
from relaxd.v1 import replica_pb2, rollout_pb2
from tests.integration.rollout.rollout_kit import READY, RUN_ID, STARTING, Coordinator, Replica, make_config
from tests.integration.rollout.sglang_external.external_kit import KEY, PROMPT, Server, Trainer, changes, logprobs


def sync(replica: Replica, trainer: Trainer, sync_id: int) -> None:
    """The calls that the coordinator makes; the version is the synchronisation's number."""
    name, ids = f"service-{sync_id}", {"sync_id": sync_id}
    weights = replica_pb2.WeightVersion(term=1, version=sync_id)
    join = trainer.member(name, 20.0)
    join.sync_id = sync_id
    receive = rollout_pb2.ReceiveWeightsRequest(
        group_name=name, weights=weights, timeout_seconds=20, checksum=True, **ids
    )
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(trainer.connect, name)
        replica.stub.JoinWeightGroup(join, timeout=25)
        connected.result(20)
        pause = rollout_pb2.PauseGenerationRequest(lease_seconds=30, **ids)
        replica.stub.PauseGeneration(pause, timeout=10)
        sent = pool.submit(trainer.broadcast, changes(trainer.tensors, sync_id))
        assert not replica.stub.ReceiveWeights(receive, timeout=25).checksums
        sent.result(20)
    replica.stub.ResumeGeneration(rollout_pb2.ResumeGenerationRequest(weights=weights, **ids), timeout=10)


def test_the_service_with_a_server_that_is_not_its_own(
    server: Server, model: Path, trainer: Trainer, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAXD_SGLANG_URL", server.url)
    monkeypatch.setenv("RELAXD_SGLANG_KEY", KEY)
    config = make_config(model, engine="sglang_external", threads=0)
    coordinator = Coordinator(config, tmp_path)
    board = Board(redis_url, RUN_ID, stages_for(config), config.board)
    board.create(term=1, groups_per_step=4, steps=100)
    board.set_gate(term=1, oldest_version=1000, open=True)
    replica = Replica(coordinator, redis_url, "rollout-0")
    try:
        replica.wait_for(lambda status: status.state == READY and "waiting for weights" in status.detail)
        sync(replica, trainer, 1)
        replica.wait_for(lambda status: status.weights.version == 1)
        (sample,) = replica.generate(PROMPT, max_new_tokens=6, ignore_eos=True)
        assert sample["versions"] == [1] * 6
        check(trainer, model, sample["tokens"], torch.tensor(sample["logprobs"]))

        prompt = {"prompt_tokens": np.array(PROMPT, np.int32), "prompt": {"text": "p", "answer": "a", "metadata": {}}}
        board.publish(term=1, groups=[NewGroup("g0", prompt, {})])
        (delivery,) = board.take("reward", "tester", count=1, block_seconds=20.0)
        columns: Any = board.load(
            [delivery], ["tokens", "lengths", "rollout_logprobs", "versions", "spans_weight_update"]
        )[0]
        assert len(columns["lengths"]) == 3
        assert set(columns["versions"]) == {1}
        assert not columns["spans_weight_update"].any()
        length = columns["lengths"][0]
        found = torch.from_numpy(columns["rollout_logprobs"][:length])
        check(trainer, model, columns["tokens"][:length].tolist(), found)

        server.kill()
        replica.wait_for(lambda status: status.state == STARTING and server.url in status.detail)
        server.start()
        server.wait_until_up()
        replica.wait_for(lambda status: status.state == READY and "waiting for weights" in status.detail)
        sync(replica, trainer, 2)
        assert replica.generate(PROMPT, max_new_tokens=2, ignore_eos=True)[0]["versions"] == [2, 2]
    finally:
        replica.close()
        coordinator.close()
        board.close()


def check(trainer: Trainer, model: Path, tokens: list[int], found: torch.Tensor) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.load_state_dict(changes(trainer.tensors, 1), strict=False)
    assert found.allclose(logprobs(reference, PROMPT, tokens, 1.0), atol=1e-4)
