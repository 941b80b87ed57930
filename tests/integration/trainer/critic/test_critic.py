"""PPO with a critic: the numbers of a plain torch loop, under every layout, and again in every replay and resume."""

import contextlib
import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import redis
import torch
import transformers

from relaxd.algorithms.ppo import PPO
from relaxd.config import RunConfig
from relaxd.config.algorithm import ALGORITHM, PPOConfig
from services.trainer.batch.micro_batch import pack
from services.trainer.batch.step_file import read_committed
from services.trainer.learner.learner import Learner
from services.trainer.learner.snapshots.snapshot import CheckpointError
from services.trainer.megatron.world import shut_down
from services.trainer.model.architecture import ModelError
from services.trainer.offline.replay import replay
from tests.integration.trainer.critic import critic_worlds
from tests.integration.trainer.critic.assembly_worlds import AssemblyJob
from tests.integration.trainer.critic.critic_worlds import CheckpointJob, train
from tests.integration.trainer.service_kit import Feeder, several_updates
from tests.integration.trainer.trainer_worlds import Job, make_learner, make_samples, run_world
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.models import make_tiny_model
from tests.kit.ports import free_port
from tests.kit.redis.redis_server import RedisServer

LENGTHS = (6, 9, 4, 11, 7, 5, 10, 8)
"""Tokens of the answers of each group: of two steps of four groups."""
RATES = {1: (1.5e-2, 1e-2), 2: (1e-2, 1e-2)}
"""Learning rates of policy and critic in each step: linear from 2e-2 to 1e-2, and constant."""
GAMMA, LAMBDA, VALUE_CLIP = 0.97, 0.9, 0.1
COMPARED = (
    *("loss", "grad_norm", "ratio", "clip_fraction_epoch_2", "value_loss", "value_grad_norm", "value_clip_fraction"),
    *("explained_variance", "value_mean", "return_mean"),
)


def config_of(model: Path, critic: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    optimizer = {"lr": 1e-2, "clip_grad": 0.5, "epsilon": 1e-3, "weight_decay": 0.1}
    ppo = {"name": "ppo", "old_logprobs": "current", "gamma": GAMMA, "gae_lambda": LAMBDA, "value_clip": VALUE_CLIP}
    return several_updates(model, ppo, {"critic": {"optimizer": optimizer, **(critic or {})}}, **trainer)


def prepare_run(redis_url: str, number: int, config: RunConfig, folder: Path, **of_group: dict[str, Any]) -> RunJob:
    """A run whose groups all wait for it, in a database of its own; `of_group` changes some groups' columns.

    Every token has a reward: what the advantage stage writes for an algorithm with a critic.
    """
    folder.mkdir(parents=True)
    url = redis_url.removesuffix("/0") + f"/{number}"
    feeder = Feeder(url, config)
    for index, length in enumerate(LENGTHS[: 4 * config.run.steps]):
        feeder.feed(1, 0, **{"length": length, "advantage": 0.2 * index, **of_group.get(f"g{index + 1}", {})})
    feeder.board.close()
    return RunJob(config, url, folder)


# --- the reference ------------------------------------------------------------------------------------------------


class PlainLoop:
    """PPO's loop for policy and critic with transformers and torch, in float64."""

    def __init__(self, config: RunConfig) -> None:
        def load() -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)

        self.policy, self.critic = load(), load().model
        self.head = torch.nn.Parameter(torch.zeros(self.policy.config.hidden_size, dtype=torch.float64))
        self.policy_optimizer = adamw(self.policy.named_parameters(), config.trainer.optimizer)
        critic = [*self.critic.named_parameters(), ("head", self.head)]
        self.critic_optimizer = adamw(critic, config.roles.critic.optimizer)
        self.critics: dict[int, Any] = {}
        """What the critic and its head were after each step."""

    def of_answers(self, group: dict[str, Any], critic_step: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of a group's answers, one after the other, and the values of the tokens before each token.

        The values are those of the critic as it is, or as it was after a step.
        """
        logprobs, values, begin = [], [], 0
        critic, head = (self.critic, self.head) if critic_step is None else self.critics[critic_step]
        prompt = torch.from_numpy(group["prompt_tokens"].astype(np.int64))
        for length in group["lengths"].tolist():
            answer = torch.from_numpy(group["tokens"][begin : begin + length].astype(np.int64))
            begin += length
            row, predicting = torch.cat([prompt, answer])[None], slice(len(prompt) - 1, -1)
            logits = self.policy(row).logits[0, predicting]
            logprobs.append(logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0])
            values.append(critic(row).last_hidden_state[0, predicting] @ head)
        return torch.cat(logprobs), torch.cat(values)

    def step(
        self, number: int, groups: dict[str, dict[str, Any]], rewards: dict[str, Any], parts: list[list[str]]
    ) -> dict[str, list[float]]:
        """One step of the run, from the rewards of tokens. Returns the numbers of each update."""
        for optimizer, rate in zip((self.policy_optimizer, self.critic_optimizer), RATES[number], strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.critics[number - 1] = copy.deepcopy((self.critic, self.head))
        with torch.no_grad():
            # A critic service says which critic gave the values.
            of_step = {name: group.get("critic_state", {"step": number - 1})["step"] for name, group in groups.items()}
            old = {name: self.of_answers(group, of_step[name]) for name, group in groups.items()}
        advantages, returns = {}, {}
        for name, group in groups.items():
            advantages[name], returns[name] = generalized(rewards[name], old[name][1], group["lengths"].tolist())
        everything = torch.cat(list(advantages.values()))
        mean, std = everything.mean(), everything.std(correction=0)
        for name, group in groups.items():
            np.testing.assert_allclose(group["values"], old[name][1].numpy(), atol=5e-5)
            np.testing.assert_allclose(group["returns"], returns[name].numpy(), atol=5e-4)
            np.testing.assert_allclose(group["advantages"], advantages[name].numpy(), atol=5e-4)
        seen: dict[str, list[float]] = {name: [] for name in COMPARED[:7] if "epoch" not in name}
        seen |= {"advantage_mean": [float(mean)], "advantage_std": [float(std)]}
        for _ in range(2):
            for part in parts:
                terms, ratios, value_terms, clipped, value_clipped = [], [], [], [], []
                for name in part:
                    logprobs, values = self.of_answers(groups[name])
                    ratio, advantage = (logprobs - old[name][0]).exp(), (advantages[name] - mean) / std
                    plain, limited = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
                    terms.append(-torch.minimum(plain, limited))
                    change = values - old[name][1]
                    near = old[name][1] + change.clamp(-VALUE_CLIP, VALUE_CLIP)
                    goal = returns[name]
                    value_terms.append(torch.maximum((values - goal) ** 2, (near - goal) ** 2) / 2)
                    ratios.append(ratio.detach())
                    clipped.append((limited < plain).double())
                    value_clipped.append((change.abs() > VALUE_CLIP).double())
                loss, value_loss = torch.cat(terms).mean(), torch.cat(value_terms).mean()
                self.policy_optimizer.zero_grad()
                self.critic_optimizer.zero_grad()
                loss.backward()
                value_loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                value_norm = torch.nn.utils.clip_grad_norm_([*self.critic.parameters(), self.head], 0.5)
                self.policy_optimizer.step()
                self.critic_optimizer.step()
                seen["loss"].append(float(loss.detach()))
                seen["grad_norm"].append(float(norm))
                seen["ratio"].append(float(torch.cat(ratios).mean()))
                seen["value_loss"].append(float(value_loss.detach()))
                seen["value_grad_norm"].append(float(value_norm))
                seen["value_clip_fraction"].append(float(torch.cat(value_clipped).mean()))
        return seen


def adamw(named: Any, settings: Any) -> torch.optim.Optimizer:
    """AdamW without decay for norms."""
    named = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if "norm" not in name], "weight_decay": settings.weight_decay},
            {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


def generalized(rewards: np.ndarray, values: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, from the last token of each answer to the first."""
    advantages, end = torch.zeros_like(values), 0
    for length in lengths:
        begin, end = end, end + length
        following = value = 0.0
        for t in reversed(range(begin, end)):
            following = float(rewards[t]) + GAMMA * value - float(values[t]) + GAMMA * LAMBDA * following
            value = float(values[t])
            advantages[t] = following
    return advantages, advantages + values


def rewards_of(config: RunConfig, names: Any) -> dict[str, np.ndarray]:
    """What `prepare_run` gives each token of the groups."""
    samples = config.rollout.samples_per_prompt
    largest = {f"g{i + 1}": (0.2 * i, length) for i, length in enumerate(LENGTHS)}
    return {n: np.repeat(np.linspace(-largest[n][0], largest[n][0], samples), largest[n][1]) for n in names}


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

WAYS: dict[str, dict[str, int]] = {
    "DP2": {},
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "CP2": {"context_parallel": 2},
}


@pytest.mark.night
def test_updates_are_the_same_under_every_layout_and_micro_batch_size(
    session_redis: RedisServer, tiny_qwen3: Path, tmp_path: Path, alone: None
) -> None:
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    jobs = {
        way: prepare_run(session_redis.url, number + 1, config_of(tiny_qwen3, ranks=2, **parallel), tmp_path / way)
        for number, (way, parallel) in enumerate(WAYS.items())
    }
    saved, layouts = [], (WAYS["DP2"], WAYS["TP2"])
    for number, parallel in enumerate(layouts):
        folder = tmp_path / f"checkpoint-{number}"
        saved += [CheckpointJob(tiny_qwen3, folder, parallel), CheckpointJob(tiny_qwen3, folder, parallel, load=True)]
        other = layouts[1 - number]
        saved.append(CheckpointJob(tiny_qwen3, folder, other, load=True, same_layout=False))
    everything = [*jobs.values(), *saved]
    worlds = run_world(everything, 2, tmp_path / "ranks", free_port(), program=critic_worlds.__name__)
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
    in_bundles, at_once = run_world(jobs, 2, tmp_path / "ranks", free_port(), program=critic_worlds.__name__)
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
