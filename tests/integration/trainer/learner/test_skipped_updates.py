"""An update whose loss or gradient isn't finite is skipped, on all ranks, and again when the step is repeated."""

import json
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relaxd.cli import run_checkpoints
from services.trainer.batch.micro_batch import PackedMicroBatch, pack
from services.trainer.batch.step_plan import step_file_path
from services.trainer.learner.learner import Learner
from services.trainer.learner.update import NonFiniteGradients
from tests.integration.trainer.learner.skipping_worlds import NaNJob
from tests.integration.trainer.service_kit import Feeder, export, make_config, trainer_service
from tests.integration.trainer.trainer_worlds import (
    EP2,
    LAYOUTS,
    TP2,
    Job,
    make_learner,
    make_model,
    make_samples,
    run_named,
)
from tests.kit.megatron_world import shut_down

OVERFLOWING = 1e38
"""An advantage that float32 can hold, as the advantage service allows it, but not the gradient that it makes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", tied=True)


OFFLOADED = {"dtype": "bfloat16", "optimizer": {"cpu_offload": True}}


def a_batch(seed: int = 0) -> PackedMicroBatch:
    return pack(make_samples(seed=seed))


def having(batch: PackedMicroBatch, name: str, value: float) -> PackedMicroBatch:
    """The same tokens with one value in a column."""
    return replace(batch, columns={**batch.columns, name: np.full_like(batch.columns[name], value)})


def overflowing(batch: PackedMicroBatch) -> PackedMicroBatch:
    """The same tokens with an advantage that is finite."""
    return having(batch, "advantages", OVERFLOWING)


def state_of(learner: Learner) -> list[torch.Tensor]:
    """Everything that an update changes: weights, main weights, the optimizer's state, the schedule."""
    tensors = [parameter.detach() for parameter in learner._policy.parameters()]
    for one in learner._optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            tensors += group["params"]
            for parameter in group["params"]:
                tensors += one.optimizer.state[parameter].values()
    rates = [float(group[name]) for group in learner._optimizer.param_groups for name in ("lr", "weight_decay")]
    return [tensor.detach().clone() for tensor in tensors] + [torch.tensor([learner._schedule.num_steps, *rates])]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("parallel", [{}, {"dtype": "bfloat16"}, OFFLOADED], ids=["float32", "bfloat16", "offloaded"])
def test_a_skipped_update_leaves_no_trace(model: Path, alone: None, parallel: dict[str, Any]) -> None:
    made = make_learner(Job(model, parallel))
    made.accumulate([a_batch()])
    assert not made.finish(20.0).skipped
    before, weights = state_of(made), made.checksum()
    # Three ways to come by it: the gradient overflows, or the loss is infinite, or not a number.
    for batch in (
        overflowing(a_batch(1)),
        having(a_batch(1), "advantages", -np.inf),
        having(a_batch(1), "rollout_logprobs", np.nan),
    ):
        made.accumulate([a_batch(2), batch])
        stats = made.finish(20.0)
        assert stats.skipped
        assert not np.isfinite(stats.loss) or not np.isfinite(stats.grad_norm)
        assert stats.lr == 1e-2
        assert same(state_of(made), before)
        assert made.checksum() == weights
        assert not any(parameter.main_grad.any() for parameter in made._policy.parameters())
    assert made.step == 4
    made.accumulate([a_batch(3)])
    after = made.finish(20.0)
    # The same as if there had been no such step.
    shut_down()
    other = make_learner(Job(model, parallel))
    for seed in (0, 3):
        other.accumulate([a_batch(seed)])
        expected = other.finish(20.0)
    assert after == replace(expected, step=5)
    assert same(state_of(made), state_of(other))


def test_a_loss_that_is_not_a_number_is_enough(model: Path, alone: None) -> None:
    made = make_learner(Job(model))
    before, batch = state_of(made), a_batch()
    made.accumulate([having(batch, "rollout_logprobs", np.nan)])
    stats = made.finish(20.0)
    assert stats.skipped
    assert np.isnan(stats.loss)
    assert np.isfinite(stats.grad_norm)
    assert same(state_of(made), before)


def test_a_repeated_step_does_what_was_done(model: Path, alone: None) -> None:
    made = make_learner(Job(model))
    before = state_of(made)
    made.accumulate([a_batch()])
    stats = made.finish(20.0, skip=True)
    assert stats.skipped
    assert np.isfinite(stats.grad_norm)
    assert same(state_of(made), before)
    made.accumulate([overflowing(a_batch())])
    with pytest.raises(NonFiniteGradients, match=r"an update of step 2 was applied before.* gradient norm (inf|nan)"):
        made.finish(20.0, skip=False)
    assert made.step == 1
    made.accumulate([a_batch()])
    assert not made.finish(20.0, skip=False).skipped
    assert not same(state_of(made), before)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("worlds")
    moe = make_model(folder / "moe", "qwen3_moe")
    jobs = {
        **{way: NaNJob(model, parallel) for way, parallel in LAYOUTS.items()},
        "EP2": NaNJob(moe, EP2),
        "MoE TP2": NaNJob(moe, TP2),
    }
    return run_named(jobs, 2, folder / "world")


@pytest.mark.slow
@pytest.mark.parametrize("way", [*LAYOUTS, "EP2", "MoE TP2"])
def test_a_nan_on_one_rank_is_seen_by_all(worlds: dict[str, list[dict[str, Any]]], way: str) -> None:
    for rank in worlds[way]:
        assert len(rank["names"]) > 4
        for name, stats in zip(rank["names"], rank["stats"], strict=True):
            assert stats.skipped, f"a NaN in {name}"
            assert np.isnan(stats.grad_norm), name
        assert [stats.step for stats in rank["stats"]] == list(range(1, len(rank["names"]) + 1))
        assert not rank["good"].skipped
        for name, tensor in rank["before"].items():
            assert np.array_equal(rank["after_nan"][name], tensor), name
            assert not np.array_equal(rank["after_good"][name], tensor), name
    assert worlds[way][0]["good"] == worlds[way][1]["good"]


def feed_overflowing(feeder: Feeder, version: int) -> list[str]:
    """Bring groups to the trainer whose advantages are finite, and whose gradient isn't."""
    return feeder.feed(2, version, advantage=OVERFLOWING)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_goes_on_after_a_skipped_update_and_replay_skips_it_too(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tiny_qwen3, run={"steps": 4}, trainer={"ranks": 2})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        feeder.feed(2, 0)
        coordinator.wait_for_version(1, 1)
        at_1 = export(process, "at-1")
        bad = feed_overflowing(feeder, 1)
        coordinator.wait_for_version(1, 2)
        assert weights(export(process, "at-2")) == weights(at_1)
        feeder.feed(2, 2)
        coordinator.wait_for_version(1, 3)
        at_3 = export(process, "at-3")
        assert weights(at_3) != weights(at_1)
        ledger = feeder.board.ledger()
        assert [entry.plan["skipped_updates"] for entry in ledger] == [[], [0], []]
        assert [entry.metrics["skipped_updates"] for entry in ledger] == [0, 1, 0]
        assert [{"loss", "grad_norm"} <= entry.metrics.keys() for entry in ledger] == [True, False, True]
        assert ledger[1].metrics["weights_checksum"] == ledger[0].metrics["weights_checksum"]
        assert ledger[1].plan["groups"] == bad
        counts = feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.open, counts.dropped) == (6, 0, 0)
        said = capfd.readouterr().err
        assert re.search(r"step 2: update 1 of 1 is skipped: .*, groups g3, g4", said)

        # The ledger decides, not the numbers: what it calls skipped is skipped, though its gradient is finite.
        call_skipped(feeder, 3)
        os.kill(process.rank_pid(), signal.SIGKILL)
        coordinator.wait_for_version(2, 3)
        assert weights(export(process, "obeyed")) == weights(at_1)
        (tmp_path / "config.json").write_text(config.model_dump_json())
        (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in ledger))
    # With the ledger as it was, and without any service, the same weights come out.
    numbers = run_checkpoints.replay_step(tmp_path, 3)["numbers"]
    assert numbers["weights_checksum"]["replayed"] == ledger[2].metrics["weights_checksum"]


def call_skipped(feeder: Feeder, step: int) -> None:
    """Have the ledger say that a step's update was skipped."""
    client, key = feeder.board._connection.client, f"{feeder.board.prefix}ledger"
    entries = client.xrange(key)
    client.delete(key)
    for number, fields in entries:
        if number == f"{step}-0".encode():
            fields[b"plan"] = json.dumps(json.loads(fields[b"plan"]) | {"skipped_updates": [0]}, sort_keys=True)
        client.xadd(key, fields, id=number)


@pytest.mark.slow
def test_too_many_in_a_row_fail_and_name_their_groups(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    config = make_config(tiny_qwen3, trainer={"max_skipped_updates": 1})
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        feed_overflowing(feeder, 0)
        coordinator.wait_for_version(1, 1)
        os.kill(process.rank_pid(), signal.SIGKILL)  # a restart forgets none
        coordinator.wait_for_version(2, 1)
        feed_overflowing(feeder, 1)
        said = coordinator.wait_for_detail("TooManySkippedUpdates")
        assert "2 updates in a row had a loss or a gradient that isn't finite" in said
        assert "more than trainer.max_skipped_updates = 1 (step 1: g1, g2; step 2: g3, g4)" in said
        assert "The weights are those of step 0; the groups of step 2 are dropped" in said
        counts = feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.dropped_by_reason) == (2, {"non_finite_gradients": 2})
        assert not step_file_path(tmp_path, 2).exists()
