"""PPO with a critic: the numbers of a plain torch loop, under every layout, and again in every replay and resume."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import redis
import torch

from relaxd.algorithms.ppo import PPO
from relaxd.config.algorithm import ALGORITHM, PPOConfig
from services.trainer.batch.micro_batch import pack
from services.trainer.batch.step_plan import read_committed
from services.trainer.learner.learner import Learner
from services.trainer.learner.snapshot import CheckpointError
from services.trainer.model.architecture import ModelError
from services.trainer.offline.replay import replay
from tests.integration.trainer.critic.assembly_worlds import AssemblyJob
from tests.integration.trainer.critic.critic_kit import (
    COMPARED,
    RATES,
    PlainLoop,
    config_of,
    prepare_run,
    rewards_of,
)
from tests.integration.trainer.critic.critic_worlds import CheckpointJob, train
from tests.integration.trainer.service_kit import Feeder
from tests.integration.trainer.trainer_worlds import LAYOUTS, Job, make_learner, make_samples, run_world
from tests.integration.trainer.training_worlds import run_job
from tests.kit.megatron_world import shut_down
from tests.kit.models import make_tiny_model
from tests.kit.redis.redis_server import RedisServer

# --- the reference ------------------------------------------------------------------------------------------------


def test_updates_are_those_of_a_plain_loop(tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None) -> None:
    config = config_of(tiny_qwen3)
    result = run_job(prepare_run(redis_url, 1, config, tmp_path / "run"))
    loop = PlainLoop(config)
    assert len(result["ledger"]) == 2
    for entry in result["ledger"]:
        file = read_committed(tmp_path / "run", entry.step, entry.plan)
        parts = [file.plan.groups_of(mini_batch) for mini_batch in file.plan.mini_batches]
        expected = loop.step(entry.step, file.groups, rewards_of(config, file.groups), parts)
        tokens = [mini_batch.trained_tokens for mini_batch in file.plan.updates]
        for name, values in expected.items():
            weights = tokens if name in ("ratio", "value_clip_fraction") else None
            mean = np.average(values, weights=weights)
            assert entry.metrics[name] == pytest.approx(mean, rel=1e-3, abs=1e-5), (entry.step, name)
        assert entry.metrics["value_lr"] == pytest.approx(RATES[entry.step][1])
        before = np.concatenate([group["values"] for group in file.groups.values()])
        goals = np.concatenate([group["returns"] for group in file.groups.values()])
        share = 1 - (goals - before).var() / goals.var()
        assert entry.metrics["explained_variance"] == pytest.approx(share, rel=1e-4, abs=1e-5)
    assert entry.metrics["value_clip_fraction"] > 0, "the second epoch is to clip"
    assert abs(entry.metrics["explained_variance"]) > 1e-3, "the critic is to have learned something"
    exact = {name: parameter.detach().float().numpy() for name, parameter in loop.policy.named_parameters()}
    for name, tensor in result["tensors"].items():
        np.testing.assert_allclose(tensor, exact[name], atol=5e-5, err_msg=name)


# --- any layout ---------------------------------------------------------------------------------------------------


@pytest.mark.night
def test_updates_are_the_same_under_every_layout_and_micro_batch_size(
    session_redis: RedisServer, tiny_qwen3: Path, tmp_path: Path, alone: None
) -> None:
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    jobs = {
        way: prepare_run(session_redis.url, number + 1, config_of(tiny_qwen3, ranks=2, **parallel), tmp_path / way)
        for number, (way, parallel) in enumerate(LAYOUTS.items())
    }
    saved, layouts = [], (LAYOUTS["DP2"], LAYOUTS["TP2"])
    for number, parallel in enumerate(layouts):
        folder = tmp_path / f"checkpoint-{number}"
        saved += [CheckpointJob(tiny_qwen3, folder, parallel), CheckpointJob(tiny_qwen3, folder, parallel, load=True)]
        other = layouts[1 - number]
        saved.append(CheckpointJob(tiny_qwen3, folder, other, load=True, same_layout=False))
    everything = [*jobs.values(), *saved]
    worlds = run_world(everything, 2, tmp_path / "ranks")
    check_checkpoints(worlds[len(jobs) :])
    found = dict(zip(jobs, worlds, strict=False))
    for number, tokens in enumerate((48, 24)):
        shut_down()
        config = config_of(tiny_qwen3, micro_batch_tokens=tokens)
        found[f"{tokens} tokens"] = [
            run_job(prepare_run(session_redis.url, 8 + number, config, tmp_path / str(tokens)))
        ]
    (expected,) = found.pop("48 tokens")
    for way, ranks in found.items():
        for ours, theirs in zip(ranks[0]["ledger"], expected["ledger"], strict=True):
            assert ours.plan["groups"] == theirs.plan["groups"], way
            for name in COMPARED:
                assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=2e-3, abs=1e-4), (way, name)
        tensors = {name: tensor for rank in ranks for name, tensor in rank["tensors"].items()}
        assert tensors.keys() == expected["tensors"].keys()
        for name, tensor in expected["tensors"].items():
            np.testing.assert_allclose(tensors[name], tensor, atol=1e-4, err_msg=f"{way} {name}")


def check_checkpoints(results: list[list[dict[str, Any]]]) -> None:
    """Policy and critic go on bit for bit in the same layout, and from the same weights in another."""
    for undisturbed, same, other in zip(results[::3], results[1::3], results[2::3], strict=True):
        for rank in (0, 1):
            assert same[rank]["numbers"] == undisturbed[rank]["numbers"]
            assert same[rank]["checksum"] == undisturbed[rank]["checksum"]
            np.testing.assert_allclose(other[rank]["numbers"], undisturbed[rank]["numbers"], rtol=1e-4, atol=1e-6)


# --- sizes --------------------------------------------------------------------------------------------------------

IN_BUNDLES, AT_ONCE = 1 << 20, 1 << 30
"""Bytes of a bundle."""
LARGE_GROUPS, LARGE_ANSWER = 48, 4096
"""Groups of a large step, and tokens of its answers, two of a group."""


def large_step(redis_url: str, number: int, model: Path, folder: Path, bundle_bytes: int) -> AssemblyJob:
    """A step of a third of a million tokens, of which both ranks train on all."""
    config = config_of(
        model, ranks=2, tensor_parallel=2, groups_per_step=LARGE_GROUPS, micro_batch_tokens=4 * LARGE_ANSWER
    )
    url = redis_url.removesuffix("/0") + f"/{number}"
    feeder = Feeder(url, config)
    feeder.feed(LARGE_GROUPS, 0, length=LARGE_ANSWER)
    feeder.board.close()
    return AssemblyJob(config, url, folder, bundle_bytes)


@pytest.mark.night
def test_neither_memory_nor_time_of_a_command_grows_with_the_step(
    session_redis: RedisServer, tiny_qwen3: Path, tmp_path: Path
) -> None:
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    jobs = [
        large_step(session_redis.url, number + 1, tiny_qwen3, tmp_path, bundle_bytes)
        for number, bundle_bytes in enumerate((IN_BUNDLES, AT_ONCE))
    ]
    in_bundles, at_once = run_world(jobs, 2, tmp_path / "ranks")
    expected = at_once[0]["checksums"]
    assert len(expected) == len(set(expected.values())) == LARGE_GROUPS
    assert all(rank["checksums"] == expected for rank in (*in_bundles, *at_once))
    first, size = in_bundles[0], in_bundles[0]["bytes"]
    assert size > 12 * IN_BUNDLES
    assert len(first["memory"]) >= size / IN_BUNDLES
    assert max(first["memory"]) < 2 * IN_BUNDLES, first["memory"]
    # The advantages of a step may take longer than a collective: no rank is in one meanwhile.
    assert first["free"] == [True] * LARGE_GROUPS


# --- normalised ---------------------------------------------------------------------------------------------------


class WholeStepConfig(PPOConfig):
    """The settings of an algorithm that always normalises."""

    needs_whole_step: ClassVar[bool] = True


class WholeStepPPO(PPO):
    """PPO that normalises its advantages over the step, as REINFORCE++ does."""

    Config = WholeStepConfig


def test_a_subclass_that_normalises_over_the_step_is_trained_as_ppo_that_does(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> None:
    config, results = config_of(tiny_qwen3, mini_batches=1, epochs=1), []
    settings = config.algorithm.model_dump(exclude={"name"}) | {"whiten_advantages": False}
    own = ALGORITHM.validate_python({"name": f"{__name__}:WholeStepPPO", "settings": settings})
    for number, algorithm in enumerate((config.algorithm, own)):
        shut_down()
        changed = config.model_copy(update={"algorithm": algorithm, "run": config.run.model_copy(update={"steps": 1})})
        results.append(run_job(prepare_run(redis_url, number + 1, changed, tmp_path / str(number))))
    (ours,), (theirs,) = (result["ledger"] for result in results)
    assert ours.plan["whitening"] == theirs.plan["whitening"]
    assert ours.metrics["weights_checksum"] == theirs.metrics["weights_checksum"]


# --- skipped, repeated --------------------------------------------------------------------------------------------


def test_what_the_critic_cannot_take_is_skipped_for_both_and_in_every_replay(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, alone: None
) -> None:
    """Returns of 1e38 are finite, and whitened advantages are, but the square of the difference to a value isn't."""
    config = config_of(tiny_qwen3)
    folder = tmp_path / "run"
    job = prepare_run(redis_url, 1, config, folder, g2={"advantage": 1e37})
    trained = run_job(job)
    first, second = trained["ledger"]
    bad = next(i for i, part in enumerate(first.plan["mini_batches"]) if "g2" in json.dumps(part["rounds"]))
    assert (first.plan["skipped_updates"], second.plan["skipped_updates"]) == ([bad, bad + 2], [])
    assert (first.metrics["optimizer_steps"], second.metrics["optimizer_steps"]) == (2, 6)
    assert np.isfinite(second.metrics["value_loss"])

    # The next trainer repeats both steps from their files, and so does `relaxd replay`: bit for bit.
    shut_down()
    again = run_job(job)
    assert all(np.array_equal(again["tensors"][name], tensor) for name, tensor in trained["tensors"].items())
    shut_down()
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, **second.metrics}) + "\n")
    (folder / "ledger.jsonl").write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in trained["ledger"]))
    result = replay(folder, 2, 0)
    assert result is not None
    assert all(numbers["recorded"] == numbers["replayed"] for numbers in result["numbers"].values()), result


# --- checkpoints --------------------------------------------------------------------------------------------------


def saved(learner: Learner, folder: Path) -> Path:
    folder.mkdir()
    snapshot = learner.snapshot(folder)
    snapshot.write()
    return folder


def test_policy_and_critic_are_saved_and_restored_together(tiny_qwen3: Path, tmp_path: Path, alone: None) -> None:
    job = Job(tiny_qwen3, algorithm={"name": "ppo"})
    learner = make_learner(job)
    train(learner, 2)
    folder = saved(learner, tmp_path / "checkpoint")
    expected, checksum = train(learner, 2, nap=True), learner.checksum()
    assert len({value for step in expected for value in step}) == 8

    shut_down()
    resumed = make_learner(job)
    with pytest.raises(CheckpointError, match="has the policy of step 3, but the critic of step 2: they must be of"):
        resumed.restore(folder, 3, same_layout=True)
    resumed.restore(folder, 2, same_layout=True)
    assert (train(resumed, 2), resumed.checksum()) == (expected, checksum)

    shut_down()
    without = saved(make_learner(Job(tiny_qwen3)), tmp_path / "without")
    shut_down()
    with pytest.raises(CheckpointError, match="without has no critic, which this run's algorithm trains"):
        make_learner(job).restore(without, 0, same_layout=True)


def test_a_critic_starts_from_the_model_that_is_asked_for(tiny_qwen3: Path, tmp_path: Path, alone: None) -> None:
    other = make_tiny_model(tmp_path / "other", architecture="qwen3", seed=7)
    found = {}
    for path in ("", str(other)):
        shut_down()
        config = config_of(tiny_qwen3, {"model": path})
        learner = Learner(tiny_qwen3, config.trainer, config.algorithm, steps=2, critic=config.roles.critic)
        assert learner._critic is not None
        found[path] = learner._critic.module.embedding.word_embeddings.weight.detach().clone()
        (values,) = learner.values([pack(make_samples())])
        assert not values.any(), "the head starts with zeros"
    assert not torch.equal(*found.values())
    shut_down()
    wide = make_tiny_model(tmp_path / "wide", architecture="qwen3", intermediate_size=192)
    config = config_of(tiny_qwen3, {"model": str(wide)})
    with pytest.raises(
        ModelError, match=r"roles.critic.model: .*wide has ffn_size 192, but the model to train has 128"
    ):
        Learner(tiny_qwen3, config.trainer, config.algorithm, steps=2, critic=config.roles.critic)
