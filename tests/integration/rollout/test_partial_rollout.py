"""Unfinished answers of replicas that are killed, drained or lose their engine: who continues them, and how."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from relaxd.seeds import seed_of
from services.rollout.engines.request_types import Version
from tests.integration.rollout.rollout_kit import PATIENCE, Replica, Stage, kill
from tests.integration.rollout.weight_source import weights_of
from tests.kit.models import make_tiny_model
from tests.kit.waiting import wait_until
from tests.unit.rollout.engine_harness import Harness

PROMPT = [5, 9, 17]
MOST = 1500
NO_TOKEN = 1000
"""A token that the model doesn't have: nothing but the maximum ends an answer."""
DRAIN_SECONDS = 20.0
"""More than a drain takes on a busy machine. That the answer wasn't written to its end, its parts tell."""


@pytest.fixture
def stage(redis_url: str, tmp_path: Path) -> Iterator[Stage]:
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    partial = {"enabled": True, "save_seconds": 0.2, "save_tokens": 64}
    stage = Stage(model, redis_url, tmp_path, max_new_tokens=MOST, stop_token_ids=[NO_TOKEN], partial=partial)
    yield stage
    stage.close()


def saved_parts(stage: Stage, group: str) -> int:
    pointers = stage.board._connection.client.hget(f"{stage.board.prefix}group:{group}", "saved:rollout")
    return len((pointers or b"").split())


def holder(stage: Stage) -> Replica | None:
    held = stage.board.oldest_held().get("rollout")
    return next((replica for replica in stage.replicas if held and replica.replica_id == held.holder), None)


def next_holder(stage: Stage, group: str, *gone: Replica) -> Replica:
    """The replica that has taken the group and added to what is saved."""

    def found() -> bool:
        now = holder(stage)
        return now is not None and now not in gone

    wait_until(found, "another replica to take the group", PATIENCE)
    now, parts = holder(stage), saved_parts(stage, group)
    wait_until(lambda: saved_parts(stage, group) > parts, "it to save more", PATIENCE)
    assert now is not None
    return now


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_answer_that_three_replicas_write_is_the_one_that_one_would_have_written(stage: Stage) -> None:
    """One is killed, one drained, of one the engine is killed: tokens, log-probs and ends are as without any of it."""
    for _ in range(3):
        stage.start_replica()
    stage.sync(4)
    (group,) = stage.publish(1, PROMPT)

    killed = next_holder(stage, group)
    kill(killed.process.pid)

    drained = next_holder(stage, group, killed)
    began = time.monotonic()
    drained.process.send_signal(signal.SIGTERM)
    wait_until(lambda: holder(stage) is not drained, "the drained replica to hand its group back", PATIENCE)
    seconds = time.monotonic() - began
    assert seconds < DRAIN_SECONDS
    assert drained.process.wait(60) == 0

    last = next_holder(stage, group, killed, drained)
    kill(last.engine_pid())
    last.wait_for(lambda status: status.detail == "waiting for weights")
    stage.sync(4, [last])
    columns = stage.generated(1)[group]

    assert (columns["lengths"] == MOST).all()
    assert (columns["continued"] == 3).all()
    assert (columns["versions"] == 4).all()
    assert columns["loss_mask"].all()
    assert not columns["spans_weight_update"].any()
    tokenizer = AutoTokenizer.from_pretrained(stage.model)
    assert columns["text"] == [tokenizer.decode(tokens) for tokens in columns["tokens"].reshape(3, MOST)]

    # What an engine writes that nobody disturbs.
    harness = Harness(stage.model, serve=False)
    harness.set_weights(Version(1, 4), {**harness.model.state_dict(), **weights_of(stage.model, 4)})
    config = stage.config
    sampling = {"max_new_tokens": MOST, "stop_token_ids": (NO_TOKEN,), "seed": seed_of(config.run.seed, group)}
    expected = harness.generate(PROMPT, 3, **sampling)
    harness.engine.stop()
    assert columns["tokens"].tolist() == [token for answer in expected for token in answer.tokens]
    np.testing.assert_allclose(
        columns["rollout_logprobs"], [one for answer in expected for one in answer.logprobs], atol=1e-4
    )
    stage.board.counts().check()
    assert not saved_parts(stage, group)
    print(f"drained in {seconds:.2f} s")
