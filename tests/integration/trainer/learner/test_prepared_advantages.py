"""Advantages that need the trainer's own log-probs, or those of models in its ranks: computed once a step is full."""

import contextlib
import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
import transformers

from relaxd.algorithms import GRPO, Advantages, Algorithm, Filtered, Needs, create
from relaxd.board import ADVANTAGES, Board, DropReason, NewGroup, stages_for
from relaxd.config import RunConfig
from services.trainer.batch.step_plan import read_committed
from services.trainer.offline.replay import replay
from tests.integration.trainer.critic.critic_kit import GAMMA, LAMBDA, generalized
from tests.integration.trainer.learner.updates_kit import PlainLoop, prepare_rewarded_run, with_steps
from tests.integration.trainer.service_kit import RUN_ID, Feeder, several_updates
from tests.integration.trainer.trainer_worlds import LAYOUTS, run_named
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.megatron_world import shut_down
from tests.kit.models import make_tiny_model
from tests.kit.redis.redis_server import RedisServer

pytestmark = pytest.mark.usefixtures("alone")
KL, DISTILL, DRIFT = 0.05, 0.3, 0.2
"""Coefficients: of the divergence in the reward, of the teacher, and of `Drifting`."""
ONE_UPDATE = {"mini_batches": 1, "epochs": 1}
WITH_BOTH = {
    "old_logprobs": "current",
    "kl_reward_coef": KL,
    "distill_coef": DISTILL,
    "normalize_std": False,
    "mask_truncated": True,
}
"""GRPO with a reference in the reward and a teacher in the advantages: cut answers have none, so the loss can't add it.
Two samples would have the same normalised advantages whatever their rewards are."""
MASKS = {"g2": {"loss_mask": np.array([1, 0, 1] * 6, np.uint8)}}


class Drifting(GRPO):
    """GRPO that takes an advantage from tokens which have become likelier than the engine said."""

    @property
    def needs(self) -> Needs:
        """The trainer's own log-probs besides GRPO's columns, in the advantages only."""
        needs = super().needs
        return Needs(loss=needs.loss, advantages=("loss_mask", "rollout_logprobs", "old_logprobs"), old_logprobs=True)

    def token_advantages(self, rewards: np.ndarray, lengths: np.ndarray, columns: Mapping[str, Any]) -> np.ndarray:
        """GRPO's less DRIFT x log(old / engine's)."""
        drift = columns["old_logprobs"].astype(np.float64) - columns["rollout_logprobs"]
        return super().token_advantages(rewards, lengths, columns) - DRIFT * drift


class Choosy(Drifting):
    """Filters groups of long answers, and fails on others; only `advantages` knows."""

    def advantages(
        self, rewards: np.ndarray, lengths: np.ndarray, columns: Mapping[str, Any] = {}
    ) -> Advantages | Filtered:
        """Answers of eleven tokens are filtered; of seven they are too long by one value."""
        if lengths[0] == 11:
            return Filtered(DropReason.ZERO_VARIANCE)
        found = super().advantages(rewards, lengths, columns)
        assert isinstance(found, Advantages)
        return Advantages(np.append(found.values, np.float32(0))) if lengths[0] == 7 and len(rewards) == 2 else found


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", architecture="qwen3", seed=7)


def with_both(model: Path, teacher: Path, **trainer: Any) -> RunConfig:
    """A reference that takes over the policy's weights after each step, and a teacher, both in the trainer's ranks."""
    roles = {"reference": {"refresh_every": 1}, "teacher": {"model": str(teacher), "placement": "trainer"}}
    return several_updates(model, WITH_BOTH, roles, **trainer)


def dropped(job: RunJob) -> dict[str, tuple[str, str]]:
    """Reason and detail of what a run has dropped, by group."""
    with contextlib.closing(Board(job.redis_url, RUN_ID, stages_for(job.config), job.config.board)) as board:
        return {one.group_id: (one.reason, one.detail) for one in board.dropped()}


def relative(rewards: np.ndarray, lengths: np.ndarray, std: float = 1.0) -> np.ndarray:
    """GRPO's advantages of each token."""
    return np.repeat((rewards - rewards.mean()) / std, lengths)


class ExactLoop(PlainLoop):
    """The loop in float64, with a reference that becomes the policy after each step, and a teacher."""

    def __init__(self, config: RunConfig, teacher: Path) -> None:
        super().__init__(config)
        self.reference = copy.deepcopy(self.model)
        self.teacher = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)

    def logprobs_of(self, model: Any, group: dict[str, Any]) -> np.ndarray:
        own, self.model = self.model, model
        with torch.no_grad():
            found = self.logprobs(group).numpy()
        self.model = own
        return found

    def with_both(self, group: dict[str, Any]) -> np.ndarray:
        """Advantages of `WITH_BOTH`."""
        trained, lengths = group["loss_mask"] != 0, group["lengths"]
        student = self.logprobs_of(self.model, group)
        divergence = np.where(trained, student - self.logprobs_of(self.reference, group), 0.0)
        per_sample = np.array([one.sum() for one in np.split(divergence, np.cumsum(lengths)[:-1])])
        towards_teacher = np.where(trained, self.logprobs_of(self.teacher, group) - student, 0.0)
        return relative(group["reward"] - KL * per_sample, lengths) + DISTILL * towards_teacher

    def drifting(self, group: dict[str, Any]) -> np.ndarray:
        """Advantages of `Drifting`."""
        drift = self.logprobs_of(self.model, group) - group["rollout_logprobs"]
        return relative(group["reward"], group["lengths"], group["reward"].std(ddof=1) + 1e-6) - DRIFT * drift


def check_steps(
    trained: dict[str, Any], loop: ExactLoop, folder: Path, advantages: Callable[[dict[str, Any]], np.ndarray]
) -> None:
    """Compare a run with the loop in float64, step by step."""
    config = loop.config
    assert len(trained["ledger"]) == 2
    for entry in trained["ledger"]:
        file = read_committed(folder, entry.step, entry.plan)
        groups = {}
        for name, group in file.groups.items():
            mask, exact = group["loss_mask"] != 0, advantages(group)
            np.testing.assert_allclose(group[ADVANTAGES][mask], exact[mask], atol=2e-4)
            groups[name] = {**group, "advantages": exact}
        parts = [file.plan.groups_of(mini_batch) for mini_batch in file.plan.mini_batches]
        expected = loop.step(entry.step, groups, parts)
        for name in ("loss", "grad_norm"):
            assert entry.metrics[name] == pytest.approx(np.mean(expected[name]), rel=1e-3, abs=1e-5), name
        loop.reference = copy.deepcopy(loop.model)
    exact = {name: parameter.detach().float().numpy() for name, parameter in loop.model.named_parameters()}
    initial = transformers.AutoModelForCausalLM.from_pretrained(config.model.path).state_dict()
    for name, tensor in trained["tensors"].items():
        np.testing.assert_allclose(tensor, exact[name], atol=5e-5, err_msg=name)
        assert np.abs(tensor - initial[name].numpy()).max() > 1e-4, name


def test_reference_and_teacher_in_the_ranks_have_their_part_in_the_advantages(
    tiny_qwen3: Path, teacher: Path, redis_url: str, tmp_path: Path
) -> None:
    """As a loop in float64 has it, with a group whose equal rewards keep it out; resumed and replayed exactly."""
    config, folder = with_both(tiny_qwen3, teacher), tmp_path / "run"
    job = prepare_rewarded_run(redis_url, 1, config, folder, **MASKS, g3={"rewards": [0.5, 0.5]})
    drained = run_job(replace(job, drain_at="step 2: update 3 of 4"))
    assert [entry.step for entry in drained["ledger"]] == [1]
    shut_down()
    trained = run_job(job)
    loop = ExactLoop(config, teacher)
    check_steps(trained, loop, folder, loop.with_both)
    assert dropped(job) == {"g3": ("zero_variance", "")}
    assert [entry.plan["groups"] for entry in trained["ledger"]] == [["g1", "g2", "g4", "g5"], ["g6", "g7", "g8", "g9"]]

    # The trainer that went on has repeated step 1 from its file. `relaxd replay` repeats both, bit for bit.
    shut_down()
    (folder / "config.json").write_text(config.model_dump_json())
    lines = [json.dumps({"step": entry.step, **entry.metrics}) + "\n" for entry in trained["ledger"]]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "ledger.jsonl").write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in trained["ledger"]))
    result = replay(folder, 2, 0)
    assert result is not None
    assert all(numbers["recorded"] == numbers["replayed"] for numbers in result["numbers"].values()), result


def test_the_numbers_are_those_of_an_advantage_stage_with_both_as_services(
    tiny_qwen3: Path, teacher: Path, redis_url: str, tmp_path: Path
) -> None:
    """Which gets the same log-probs as columns, here from transformers."""
    roles: dict[str, Any] = {"teacher": {"model": str(teacher), "placement": "trainer"}}
    served = {"reference": {"placement": "service"}, "teacher": {"model": str(teacher)}}
    inside, outside = (several_updates(tiny_qwen3, WITH_BOTH, one, **ONE_UPDATE) for one in (roles, served))
    inside, outside = (
        one.model_copy(update={"run": one.run.model_copy(update={"steps": 1})}) for one in (inside, outside)
    )
    ours = run_job(prepare_rewarded_run(redis_url, 1, inside, tmp_path / "inside"))
    shut_down()

    loop, algorithm = ExactLoop(outside, teacher), create(outside.algorithm)
    job = RunJob(outside, redis_url.removesuffix("/0") + "/2", tmp_path / "outside")
    job.folder.mkdir()
    (entry,) = ours["ledger"]
    file = read_committed(tmp_path / "inside", 1, entry.plan)
    with contextlib.closing(Feeder(job.redis_url, outside).board) as board:
        play_stages(board, file.groups, loop, algorithm)
    theirs = run_job(job)
    for name in ("loss", "grad_norm", "kl", "teacher_kl"):
        assert entry.metrics[name] == pytest.approx(theirs["ledger"][0].metrics[name], rel=1e-4), name
    for name, tensor in theirs["tensors"].items():
        np.testing.assert_allclose(ours["tensors"][name], tensor, atol=1e-5, err_msg=name)


def play_stages(board: Board, groups: dict[str, dict[str, Any]], loop: ExactLoop, algorithm: Algorithm) -> None:
    """Bring groups of a step file through all stages of a run with services."""
    for group_id, group in groups.items():
        published = {name: group[name] for name in ("prompt_tokens", "prompt")}
        board.publish(term=1, groups=[NewGroup(group_id, published, {})])
        columns = dict(group)
        columns["ref_logprobs"] = loop.logprobs_of(loop.reference, group).astype(np.float32)
        columns["teacher_logprobs"] = loop.logprobs_of(loop.teacher, group).astype(np.float32)
        found = algorithm.advantages(group["reward"], group["lengths"], columns)
        assert isinstance(found, Advantages)
        columns["advantages"] = found.values
        for stage in board.stages[:-1]:
            (delivery,) = board.take(stage.name, "tester", count=1, block_seconds=1.0)
            if stage.name == "rollout":
                assert board.begin(delivery, 0)
            assert board.commit([(delivery, {name: columns[name] for name in stage.writes})]) == [True]


def own_algorithm(name: str) -> dict[str, Any]:
    return {"name": f"{__name__}:{name}", "settings": {"old_logprobs": "current", "drop_zero_variance": False}}


def test_a_class_of_ones_own_sees_the_trainers_log_probs(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    """Also where its steps have one update, in which no loss needs them."""
    config = several_updates(tiny_qwen3, own_algorithm("Drifting"), **ONE_UPDATE)
    trained = run_job(prepare_rewarded_run(redis_url, 1, config, tmp_path / "run"))
    loop = ExactLoop(config, tiny_qwen3)
    check_steps(trained, loop, tmp_path / "run", loop.drifting)


def test_what_only_advantages_know_of_a_group(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    """A filtered group stays in its step, with advantages of 0. One on which the class fails is dropped, untrained."""
    config = several_updates(tiny_qwen3, own_algorithm("Choosy"), **ONE_UPDATE)
    job = prepare_rewarded_run(redis_url, 1, config, tmp_path / "run")
    trained = run_job(job)
    assert [entry.plan["groups"] for entry in trained["ledger"]] == [["g1", "g2", "g3", "g4"], ["g6", "g7", "g8", "g9"]]
    first = read_committed(tmp_path / "run", 1, trained["ledger"][0].plan)
    assert [bool(group[ADVANTAGES].any()) for group in first.groups.values()] == [True, True, True, False]
    said = "advantages() returned values float32 [15]: they must be float32 [14], one for each token"
    assert dropped(job) == {"g5": ("algorithm_failed", f"{__name__}:Choosy: {said}")}


def test_a_group_to_which_the_teacher_says_nothing_is_dropped_and_its_step_starts_over(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    silent = make_tiny_model(tmp_path / "silent", architecture="qwen3", tied=False)
    made = transformers.AutoModelForCausalLM.from_pretrained(silent)
    made.get_input_embeddings().weight.data[255] = float("nan")
    made.save_pretrained(silent)
    roles = {"teacher": {"model": str(silent), "placement": "trainer"}}
    config = with_steps(several_updates(tiny_qwen3, {"name": "opd"}, roles, **ONE_UPDATE), 1)
    tokens = np.arange(100, 118, dtype=np.int32)
    tokens[4] = 255
    job = prepare_rewarded_run(redis_url, 1, config, tmp_path / "run", g2={"tokens": tokens})
    (entry,) = run_job(job)["ledger"]
    assert (entry.plan["groups"], entry.plan["skipped_updates"]) == (["g1", "g3", "g4", "g5"], [])
    ((group_id, (reason, said)),) = dropped(job).items()
    assert (group_id, reason) == ("g2", "no_logprobs")
    assert re.fullmatch(r"the teacher gives \d+ of its 18 trained tokens a log-prob that isn't finite", said)


def test_a_critic_learns_rewards_less_the_divergence(tiny_qwen3: Path, redis_url: str, tmp_path: Path) -> None:
    """The last token of an answer has its reward, and each token its part of the divergence."""
    algorithm = {"name": "ppo", "old_logprobs": "current", "kl_reward_coef": KL, "gamma": GAMMA, "gae_lambda": LAMBDA}
    config = with_steps(several_updates(tiny_qwen3, algorithm, **ONE_UPDATE), 1)
    trained = run_job(prepare_rewarded_run(redis_url, 1, config, tmp_path / "run"))
    (entry,), loop = trained["ledger"], ExactLoop(config, tiny_qwen3)
    for group in read_committed(tmp_path / "run", 1, entry.plan).groups.values():
        rewards = -KL * (loop.logprobs_of(loop.model, group) - loop.logprobs_of(loop.reference, group))
        rewards[np.cumsum(group["lengths"]) - 1] += group["reward"]
        lengths, values = group["lengths"].tolist(), torch.from_numpy(group["values"]).double()
        advantages, returns = generalized(rewards, values, lengths)
        np.testing.assert_allclose(group["advantages"], advantages.numpy(), atol=1e-4)
        np.testing.assert_allclose(group["returns"], returns.numpy(), atol=1e-4)


# --- any layout ---------------------------------------------------------------------------------------------------


@pytest.mark.night
def test_advantages_are_the_same_under_every_layout_and_micro_batch_size(
    session_redis: RedisServer, tiny_qwen3: Path, teacher: Path, tmp_path: Path
) -> None:
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    jobs = {
        way: prepare_rewarded_run(
            session_redis.url, number + 1, with_both(tiny_qwen3, teacher, ranks=2, **parallel), tmp_path / way, **MASKS
        )
        for number, (way, parallel) in enumerate(LAYOUTS.items())
    }
    found, folders = run_named(jobs, 2, tmp_path / "ranks"), {way: job.folder for way, job in jobs.items()}
    for number, tokens in enumerate((48, 24)):
        shut_down()
        config, way = with_both(tiny_qwen3, teacher, micro_batch_tokens=tokens), f"{tokens} tokens"
        job = prepare_rewarded_run(session_redis.url, 8 + number, config, tmp_path / way, **MASKS)
        found[way], folders[way] = [run_job(job)], job.folder
    (expected,) = found.pop("48 tokens")
    for way, ranks in found.items():
        for ours, theirs in zip(ranks[0]["ledger"], expected["ledger"], strict=True):
            assert ours.plan["groups"] == theirs.plan["groups"], way
            for name in ("loss", "grad_norm", "kl", "teacher_kl", "ratio", "clip_fraction_epoch_2"):
                assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=2e-3, abs=1e-4), (way, name)
            mine = read_committed(folders[way], ours.step, ours.plan).groups
            others = read_committed(folders["48 tokens"], theirs.step, theirs.plan).groups
            for group_id, columns in others.items():
                np.testing.assert_allclose(mine[group_id][ADVANTAGES], columns[ADVANTAGES], atol=2e-3, err_msg=way)
        tensors = {name: tensor for rank in ranks for name, tensor in rank["tensors"].items()}
        assert tensors.keys() == expected["tensors"].keys()
        for name, tensor in expected["tensors"].items():
            np.testing.assert_allclose(tensors[name], tensor, atol=1e-4, err_msg=f"{way} {name}")
