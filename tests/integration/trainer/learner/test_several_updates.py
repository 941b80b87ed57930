"""Steps of two phases: the numbers of a plain torch loop, under every layout, and again in every replay."""

import contextlib
import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
import transformers

from relaxd.board import LedgerEntry
from relaxd.config import RunConfig
from services.trainer.batch.step_plan import StepPlan, read_committed
from services.trainer.learner.update import NonFiniteGradients
from services.trainer.offline.replay import replay
from tests.integration.trainer.learner.updates_kit import (
    LENGTHS,
    NORMALISED,
    RATES,
    PlainLoop,
    config_of,
    normalisation,
    prepare_run,
)
from tests.integration.trainer.service_kit import trainer_service
from tests.integration.trainer.trainer_worlds import LAYOUTS, run_named
from tests.integration.trainer.training_worlds import run_job
from tests.kit.megatron_world import shut_down
from tests.kit.redis.redis_server import RedisServer

UNEVEN: dict[str, dict[str, Any]] = {
    "g1": {"least_advantage": 0.0},
    "g2": {"advantage": 0.25, "loss_mask": np.array([1, 0, 1] * 6, np.uint8)},
    "g6": {"advantage": 3.0, "least_advantage": 2.0},
}
"""Groups whose advantages differ in mean, one of them with tokens that aren't trained on."""


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs have the same weights, bit for bit."""
    tensors, others = one["tensors"], other["tensors"]
    return tensors.keys() == others.keys() and all(np.array_equal(tensors[name], others[name]) for name in tensors)


# --- the reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [{}, NORMALISED], ids=["grpo", "normalised"])
def test_updates_are_those_of_a_plain_loop(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None, algorithm: dict[str, Any]
) -> None:
    config = config_of(tiny_qwen3, algorithm)
    result = run_job(prepare_run(redis_url, 1, config, tmp_path / "run", **UNEVEN))
    loop = PlainLoop(config)
    assert len(result["ledger"]) == 2
    for entry in result["ledger"]:
        file = read_committed(tmp_path / "run", entry.step, entry.plan)
        parts = [file.plan.groups_of(mini_batch) for mini_batch in file.plan.mini_batches]
        assert [len(part) for part in parts] == [2, 2]
        with torch.no_grad():
            for group in file.groups.values():
                expected = loop.logprobs(group).numpy() * group["loss_mask"]
                np.testing.assert_allclose(group["old_logprobs"], expected, atol=2e-5)
        expected = loop.step(entry.step, file.groups, parts)
        assert any(expected["clip_fraction"][1:]), "the second epoch is to clip"
        tokens = [mini_batch.trained_tokens for mini_batch in file.plan.updates]
        for name in ("loss", "grad_norm"):
            assert entry.metrics[name] == pytest.approx(np.mean(expected[name]), rel=1e-4, abs=1e-6), name
            for epoch in (0, 1):
                mean = np.mean(expected[name][2 * epoch : 2 * epoch + 2])
                assert entry.metrics[f"{name}_epoch_{epoch + 1}"] == pytest.approx(mean, rel=1e-4, abs=1e-6), name
        for epoch in (0, 1):
            own = slice(2 * epoch, 2 * epoch + 2)
            mean = np.average(expected["clip_fraction"][own], weights=tokens[own])
            assert entry.metrics[f"clip_fraction_epoch_{epoch + 1}"] == pytest.approx(mean, abs=1e-6)
        assert (entry.metrics["optimizer_steps"], entry.metrics["skipped_updates"]) == (4 * entry.step, 0)
        assert entry.metrics["lr"] == pytest.approx(RATES[entry.step])
    exact = {name: parameter.detach().float().numpy() for name, parameter in loop.model.named_parameters()}
    initial = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3).state_dict()
    for name, tensor in result["tensors"].items():
        np.testing.assert_allclose(tensor, exact[name], atol=2e-5, err_msg=name)
        assert np.abs(tensor - initial[name].numpy()).max() > 1e-4, name


def test_a_step_of_one_update_waits_for_its_advantages_and_is_repeated_exactly(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> None:
    config = config_of(tiny_qwen3, NORMALISED, **ONE_UPDATE)
    job = prepare_run(redis_url, 1, config, tmp_path / "run", **UNEVEN)
    trained = run_job(job)
    loop = PlainLoop(config)
    for entry in trained["ledger"]:
        file = read_committed(tmp_path / "run", entry.step, entry.plan)
        expected = loop.step(entry.step, file.groups, [list(file.groups)])
        for name in ("loss", "grad_norm"):
            assert [entry.metrics[name]] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        mean, std = normalisation(file.groups)
        assert abs(mean) > 0.02, "normalising makes a difference"
        recorded = (entry.metrics["advantage_mean"], entry.metrics["advantage_std"])
        assert recorded == pytest.approx((mean, std), rel=1e-12)
        assert entry.plan["whitening"] == dict(zip(("mean", "deviation"), recorded, strict=True))
    # The step files have the advantages as they came, so that the next trainer normalises them once.
    shut_down()
    again = run_job(job)
    assert same(again, trained)


# --- any layout ---------------------------------------------------------------------------------------------------

WITH_KL = {"kl_coef": 0.1, "entropy_coef": 0.01}
"""A reference of the trainer's own, whose log-probs are prepared, too."""
ONE_UPDATE = {"mini_batches": 1, "epochs": 1}
LONG_STEP: dict[str, Any] = {"ranks": 2, "epochs": 20, "optimizer": {"lr": 1e-3}}
"""A step that takes long enough to be interrupted."""


@pytest.fixture(scope="module")
def worlds(
    session_redis: RedisServer, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The results of both ranks, by layout."""
    root = tmp_path_factory.mktemp("worlds")
    jobs = {}
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    for number, (way, parallel) in enumerate(LAYOUTS.items()):
        config = config_of(tiny_qwen3, WITH_KL, ranks=2, **parallel)
        jobs[way] = prepare_run(session_redis.url, number + 1, config, root / way)
    for way, parallel in LAYOUTS.items():
        config, name = config_of(tiny_qwen3, NORMALISED, ranks=2, **ONE_UPDATE, **parallel), f"normalised, {way}"
        jobs[name] = prepare_run(session_redis.url, len(jobs) + 1, config, root / name, **UNEVEN)
    config = long_step(tiny_qwen3)
    jobs["long step"] = prepare_run(session_redis.url, len(jobs) + 1, config, root / "long")
    return run_named(jobs, 2, root / "ranks")


def long_step(model: Path) -> RunConfig:
    config = config_of(model, NORMALISED, **LONG_STEP)
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": 1})})


@pytest.mark.night
def test_updates_are_the_same_under_every_layout_and_micro_batch_size(
    worlds: dict[str, list[dict[str, Any]]], tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> None:
    found = dict(worlds)
    for number, tokens in enumerate((48, 24)):
        shut_down()
        config = config_of(tiny_qwen3, WITH_KL, micro_batch_tokens=tokens)
        found[f"{tokens} tokens"] = [run_job(prepare_run(redis_url, number + 1, config, tmp_path / str(tokens)))]
    (expected,) = found.pop("48 tokens")
    found = {way: ranks for way, ranks in found.items() if way != "long step" and "normalised" not in way}
    assert [len(entry.plan["mini_batches"]) for entry in expected["ledger"]] == [2, 2]
    for way, ranks in found.items():
        for ours, theirs in zip(ranks[0]["ledger"], expected["ledger"], strict=True):
            assert ours.plan["groups"] == theirs.plan["groups"], way
            for name in ("loss", "grad_norm", "kl", "entropy", "ratio", "clip_fraction_epoch_2", "policy_drift"):
                assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=2e-3, abs=1e-4), (way, name)
        tensors = {name: tensor for rank in ranks for name, tensor in rank["tensors"].items()}
        assert tensors.keys() == expected["tensors"].keys()
        for name, tensor in expected["tensors"].items():
            np.testing.assert_allclose(tensors[name], tensor, atol=1e-4, err_msg=f"{way} {name}")


@pytest.mark.slow
def test_advantages_are_normalised_over_all_ranks(
    worlds: dict[str, list[dict[str, Any]]], tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> None:
    config = config_of(tiny_qwen3, NORMALISED, **ONE_UPDATE)
    alone_on_one_rank = run_job(prepare_run(redis_url, 1, config, tmp_path / "run", **UNEVEN))
    for way in LAYOUTS:
        ranks = worlds[f"normalised, {way}"]
        for ours, theirs in zip(ranks[0]["ledger"], alone_on_one_rank["ledger"], strict=True):
            assert ours.plan["whitening"] == theirs.plan["whitening"], "bit for bit"
            assert len(ours.plan["mini_batches"][0]["rounds"][0]) == (2 if way == "DP2" else 1)
            for name in ("loss", "grad_norm", "ratio"):
                assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-4, abs=1e-6), (way, name)
        tensors = {name: tensor for rank in ranks for name, tensor in rank["tensors"].items()}
        for name, tensor in alone_on_one_rank["tensors"].items():
            np.testing.assert_allclose(tensors[name], tensor, atol=2e-5, err_msg=f"{way} {name}")


# --- skipped, repeated, interrupted -------------------------------------------------------------------------------


def test_a_skipped_update_in_the_middle_is_skipped_in_every_replay(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> None:
    config = config_of(tiny_qwen3)
    folder = tmp_path / "run"
    job = prepare_run(redis_url, 1, config, folder, g2={"advantage": 1e38})
    trained = run_job(job)
    first, second = trained["ledger"]
    parts = [StepPlan.from_json(first.plan).groups_of(part) for part in StepPlan.from_json(first.plan).mini_batches]
    bad = next(index for index, part in enumerate(parts) if "g2" in part)
    assert (first.plan["skipped_updates"], second.plan["skipped_updates"]) == ([bad, bad + 2], [])
    assert (first.metrics["skipped_updates"], first.metrics["optimizer_steps"]) == (2, 2)
    assert (second.metrics["skipped_updates"], second.metrics["optimizer_steps"]) == (0, 6)
    assert np.isfinite(first.metrics["grad_norm"])

    # The next trainer repeats both steps from their files.
    shut_down()
    again = run_job(job)
    assert same(again, trained)
    assert (again["optimizer_steps"], len(again["ledger"])) == (6, 2)

    # So does `relaxd replay`, and what it compares is the same bit for bit.
    shut_down()
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, **second.metrics}) + "\n")
    write_ledger(folder, trained["ledger"])
    result = replay(folder, 2, 0)
    assert result is not None
    assert all(numbers["recorded"] == numbers["replayed"] for numbers in result["numbers"].values()), result

    # The ledger decides what is skipped, not the numbers.
    shut_down()
    write_ledger(folder, [first, replace(second, plan={**second.plan, "skipped_updates": [3]})])
    result = replay(folder, 2, 0)
    assert result is not None
    assert result["numbers"]["weights_checksum"]["replayed"] != second.metrics["weights_checksum"]
    write_ledger(folder, [replace(first, plan={**first.plan, "skipped_updates": []}), second])
    shut_down()
    with pytest.raises(NonFiniteGradients, match="an update of step 1 was applied before"):
        replay(folder, 2, 0)


def test_updates_are_given_up_where_the_trainer_drains(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> None:
    config = config_of(tiny_qwen3)
    job = prepare_run(redis_url, 1, config, tmp_path / "drained")
    drained = run_job(replace(job, drain_at="step 2: update 3 of 4"))
    assert [entry.step for entry in drained["ledger"]] == [1]
    assert drained["optimizer_steps"] == 6, "the second step was half done"
    shut_down()
    resumed = run_job(job)
    shut_down()
    undisturbed = run_job(prepare_run(redis_url, 2, config, tmp_path / "undisturbed"))
    assert same(resumed, undisturbed)
    assert not same(resumed, drained)
    for one, other in zip(resumed["ledger"], undisturbed["ledger"], strict=True):
        assert one.plan["groups"] == other.plan["groups"]
        assert one.metrics["weights_checksum"] == other.metrics["weights_checksum"]


def write_ledger(folder: Path, entries: list[LedgerEntry]) -> None:
    (folder / "ledger.jsonl").write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in entries))


@pytest.mark.slow
def test_a_death_in_the_middle_of_the_updates_loses_nothing(
    worlds: dict[str, list[dict[str, Any]]], tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    with trainer_service(long_step(tiny_qwen3), redis_url, tmp_path) as (coordinator, feeder, process):
        for length in LENGTHS[:4]:
            feeder.feed(1, 0, length=length)
        coordinator.wait(lambda: "step 1: update" in coordinator.status.detail)
        os.kill(process.rank_pid(1), signal.SIGKILL)
        assert feeder.board.last_step() == 0, "it was killed in the middle"
        coordinator.wait_for_version(2, 1)
        counts = feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.open, counts.dropped) == (4, 0, 0)
        (entry,) = feeder.board.ledger()
    expected = worlds["long step"][0]["ledger"][0]
    for name in ("loss", "grad_norm", "weights_checksum", "optimizer_steps"):
        assert entry.metrics[name] == expected.metrics[name], name
    assert entry.metrics["optimizer_steps"] == 40
