"""Routing replay: the experts that the engine or the first pass chose, in every layout, in step files and replays."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
import transformers
from torch import Tensor

from relaxd.config import RunConfig
from relaxd.data.vision import read_vision
from services.trainer.batch.micro_batch import PackedMicroBatch, TrainSequence, pack
from services.trainer.batch.step_plan import read_committed
from services.trainer.learner.learner import Learner
from services.trainer.model.architecture import ModelError
from tests.integration.trainer.learner import image_worlds
from tests.integration.trainer.service_kit import Feeder, make_config
from tests.integration.trainer.trainer_worlds import (
    CP2,
    EP2,
    PP2,
    TP2,
    Job,
    make_learner,
    make_model,
    make_samples,
    run_world,
)
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit import vision
from tests.kit.megatron_world import shut_down
from tests.kit.redis.redis_server import RedisServer

LAYERS, EXPERTS, TOP_K = 2, 4, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3_moe", "qwen3_moe")


def random_experts(rows: int, seed: int) -> np.ndarray:
    """Experts that no router has chosen, different ones for each token: uint8 [rows, LAYERS, TOP_K]."""
    scores = np.random.default_rng(seed).random((rows, LAYERS, EXPERTS))
    return scores.argsort(-1)[..., :TOP_K].astype(np.uint8)


# --- one rank: what the loss and its gradients are -----------------------------------------------------------------


def with_experts(samples: list[TrainSequence], experts: list[np.ndarray]) -> list[TrainSequence]:
    """Samples with experts [tokens, LAYERS, TOP_K]."""
    return [replace(one, experts=each.astype(np.int16)) for one, each in zip(samples, experts, strict=True)]


def gradients(learner: Learner, samples: list[TrainSequence]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The summed loss's gradients, and the metrics of the update."""
    learner.accumulate([pack(samples, share_prompts=False)])
    found = {name: parameter.main_grad.clone() for name, parameter in learner._policy.named_parameters()}
    return found, learner.finish(1.0).metrics


def in_float64(folder: Path) -> Any:
    """transformers' model, whose own grouped products don't know float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )


def theirs(folder: Path, samples: list[TrainSequence], experts: list[np.ndarray]) -> dict[str, Tensor]:
    """Gradients of transformers' model in float64, whose routers are made to use given experts."""
    reference = in_float64(folder)
    given: list[Tensor] = []

    def routed(layer: int) -> Callable[..., Any]:
        def hook(gate: torch.nn.Module, inputs: Any, output: Any) -> Any:
            logits = inputs[0].reshape(-1, inputs[0].shape[-1]) @ gate.weight.t()
            chosen = given[layer]
            weights = logits.softmax(-1).gather(-1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return hook

    for layer, block in enumerate(reference.model.layers):
        block.mlp.gate.register_forward_hook(routed(layer))
    loss = torch.zeros((), dtype=torch.float64)
    for sample, each in zip(samples, experts, strict=True):
        given[:] = list(torch.from_numpy(each.astype(np.int64)).transpose(0, 1))
        logits = reference(torch.from_numpy(sample.tokens)[None]).logits[0] / sample.temperature
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(sample.tokens)[1:, None])[:, 0]
        loss = loss - (logprobs * torch.from_numpy(sample.columns["advantages"] * sample.loss_mask)[1:].double()).sum()
    loss.backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters()}


def learner_of(folder: Path, **trainer: Any) -> Learner:
    """A learner that replays what the micro-batches bring."""
    shut_down()
    made: Learner = make_learner(Job(folder, {"routing_replay": "rollout", **trainer}, {"old_logprobs": "current"}))
    return made


def test_gradients_are_those_of_transformers_with_the_given_experts(model: Path) -> None:
    samples = make_samples(5, temperature=0.8)
    experts = [random_experts(len(one.tokens), seed) for seed, one in enumerate(samples)]
    learner = learner_of(model)
    found, metrics = gradients(learner, with_experts(samples, experts))
    expected = theirs(model, samples, experts)
    for layer in range(LAYERS):
        pairs = {"router.weight": "gate.weight", "experts.linear_fc1": "experts.gate_up_proj"}
        for ours, name in (pairs | {"experts.linear_fc2": "experts.down_proj"}).items():
            exact = expected[f"model.layers.{layer}.mlp.{name}"]
            difference = found[f"decoder.layers.{layer}.mlp.{ours}"].double().view(exact.shape) - exact
            assert difference.norm() < 2e-5 * exact.norm(), (layer, ours)
    # The load is that of the experts that were used, not of those that the routers preferred.
    counts = np.stack([np.bincount(np.concatenate(experts)[:, layer].ravel(), minlength=EXPERTS) for layer in (0, 1)])
    fullest = counts.max(1) / counts.mean(1)
    assert metrics["expert_load_max"] == pytest.approx(fullest.max())
    assert metrics["expert_load_mean"] == pytest.approx(fullest.mean())
    assert 0.3 < metrics["expert_replaced"] < 0.7, "half of what is drawn from four experts isn't among the best two"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_replaying_the_routers_own_choice_changes_no_bit(model: Path, recompute: str) -> None:
    samples = make_samples(6)
    expected, _ = gradients(learner_of(model, routing_replay="none"), samples)
    learner = learner_of(model, recompute=recompute)
    batch = pack(samples, share_prompts=False)
    logprobs, (recorded,) = learner.log_probs_and_experts([batch])
    np.testing.assert_array_equal(logprobs[0], learner.log_probs([batch])[0])
    assert (recorded.dtype, recorded.shape) == (np.uint8, (len(batch.tokens), LAYERS, TOP_K))
    own = [recorded[begin:end] for begin, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    found, metrics = gradients(learner, with_experts(samples, own))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert metrics["expert_replaced"] == 0


def test_a_replay_with_images_and_video_changes_no_bit(tmp_path: Path) -> None:
    mixture = {"tied": False, "model_type": "qwen3_vl_moe", **vision.EXPERTS}
    folder = vision.make_vision_model(tmp_path / "seeing", **mixture)
    samples = image_worlds.make_samples(read_vision(folder))
    expected, _ = gradients(learner_of(folder, routing_replay="none", freeze=[]), samples)
    learner = learner_of(folder, freeze=[])
    batch = pack(samples, share_prompts=False)
    (recorded,) = learner.log_probs_and_experts([batch])[1]
    own = [recorded[begin:end] for begin, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    found, metrics = gradients(learner, with_experts(samples, own))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert metrics["expert_replaced"] == 0
    others = [np.roll(one, 1, axis=0) for one in own]
    found, metrics = gradients(learner_of(folder, freeze=[]), with_experts(samples, others))
    assert not any(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert metrics["expert_replaced"] > 0.1


def test_experts_that_are_not_given_are_the_routers_choice(model: Path) -> None:
    samples = make_samples(6)
    expected, _ = gradients(learner_of(model, routing_replay="none"), samples)
    nothing = [np.full((len(one.tokens), LAYERS, TOP_K), -1) for one in samples]
    found, metrics = gradients(learner_of(model), with_experts(samples, nothing))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert metrics["expert_replaced"] == 0


def test_reference_and_critic_keep_their_own_routing(model: Path) -> None:
    samples = make_samples(6)
    given = with_experts(samples, [random_experts(len(one.tokens), 1) for one in samples])
    shut_down()
    learner = make_learner(Job(model, {"routing_replay": "rollout"}, {"name": "ppo", "kl_coef": 0.1}))
    with torch.no_grad():  # a new critic's values are all zero
        learner._critic.module.output_weight().normal_()

    def reference(batches: list[PackedMicroBatch]) -> list[np.ndarray]:
        return [columns["ref_logprobs"] for columns in learner.frozen_columns(batches)]

    for compute, same in ((reference, True), (learner.values, True), (learner.log_probs, False)):
        (with_given,), (without,) = compute([pack(given)]), compute([pack(samples)])
        assert np.array_equal(with_given, without) == same


def test_a_model_without_experts_is_refused(tiny_qwen3: Path) -> None:
    with pytest.raises(ModelError, match=r'routing_replay is "rollout", but the model \(qwen3\) has no experts: set'):
        learner_of(tiny_qwen3)


# --- whole steps: from the board into step files, under every layout -----------------------------------------------

MODES = ("rollout", "trainer")
WAYS: dict[tuple[str, str], dict[str, Any]] = {
    ("rollout", "TP2"): TP2 | {"recompute": "full"},
    ("rollout", "EP2"): EP2,
    ("rollout", "PP2"): PP2 | {"recompute": "selective"},
    ("rollout", "CP2"): CP2,
    ("trainer", "DP2"): {},
    ("trainer", "TP2"): {"tensor_parallel": 2},
    ("trainer", "PP2"): {"pipeline_parallel": 2},
    ("trainer", "CP2"): {"context_parallel": 2},
}
LENGTHS = (6, 9, 4, 11)


def config_of(folder: Path, mode: str, **trainer: Any) -> RunConfig:
    """A step of four groups and two mini-batches."""
    return make_config(
        folder,
        run={"steps": 1},
        rollout={"engine": "sglang", "return_routed_experts": mode == "rollout"},
        trainer={
            "routing_replay": mode,
            "groups_per_step": 4,
            "mini_batches": 2,
            "micro_batch_tokens": 48,
            "checkpoint": {"every": 0},
            "optimizer": {"lr": 1e-2, "epsilon": 1e-3},
            **trainer,
        },
        algorithm={"old_logprobs": "current"},
        board={"max_staleness": 8},
    )


def group_experts(number: int, length: int) -> np.ndarray:
    """What an engine returns for a group's two samples: of the five tokens of their prompt they have the same."""
    prompt = random_experts(5, 1000 + number)
    answers = [random_experts(length - 1, 10 * number + sample) for sample in range(2)]
    return np.concatenate([part for answer in answers for part in (prompt, answer)])


def prepare_run(redis_url: str, number: int, config: RunConfig, folder: Path) -> RunJob:
    """A run whose groups wait for it, in a database of its own."""
    folder.mkdir(parents=True)
    url = redis_url.removesuffix("/0") + f"/{number}"
    feeder = Feeder(url, config)
    for index, length in enumerate(LENGTHS):
        experts = {"routed_experts": group_experts(index, length)} if config.rollout.return_routed_experts else {}
        feeder.feed(1, 0, length=length, **experts)
    feeder.board.close()
    return RunJob(config, url, folder)


def recorded(job: RunJob, result: dict[str, Any]) -> dict[str, np.ndarray]:
    """The routed experts in the step's file, by group."""
    (entry,) = result["ledger"]
    file = read_committed(job.folder, 1, entry.plan)
    return {name: columns["routed_experts"] for name, columns in file.groups.items()}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_and_its_replay_use_the_experts_of_the_step_file(
    model: Path, redis_url: str, tmp_path: Path, alone: None, mode: str
) -> None:
    config = config_of(model, mode)
    job = prepare_run(redis_url, 1, config, tmp_path / "run")
    trained = run_job(job)
    (entry,) = trained["ledger"]
    for index, (name, experts) in enumerate(sorted(recorded(job, trained).items())):
        assert experts.dtype == np.uint8
        if mode == "rollout":
            np.testing.assert_array_equal(experts, group_experts(index, LENGTHS[index]))
        else:
            np.testing.assert_array_equal(np.sort(experts, -1), routing_of(model, job, entry.plan, name))
    assert entry.metrics["expert_replaced"] > (0.3 if mode == "rollout" else 0.0)
    shut_down()
    again = run_job(job)  # the next trainer repeats the step from its file
    assert all(np.array_equal(again["tensors"][name], tensor) for name, tensor in trained["tensors"].items())
    shut_down()
    free = run_job(prepare_run(redis_url, 2, config_of(model, "none"), tmp_path / "free"))
    assert not np.allclose(free["tensors"]["lm_head.weight"], trained["tensors"]["lm_head.weight"], atol=1e-4)


def routing_of(folder: Path, job: RunJob, plan: Any, name: str) -> np.ndarray:
    """What transformers' routers choose for a group under the initial weights, as the column has it, sorted."""
    columns = read_committed(job.folder, 1, plan).groups[name]
    reference = in_float64(folder)
    rows = []
    for answer in np.split(columns["tokens"], 2):
        tokens = torch.from_numpy(np.concatenate([columns["prompt_tokens"], answer]).astype(np.int64))
        with torch.no_grad():
            routed = reference(tokens[None], output_router_logits=True).router_logits
        rows.append(torch.stack([logits.view(-1, EXPERTS).topk(TOP_K).indices for logits in routed], 1)[:-1])
    return np.sort(torch.cat(rows).numpy(), -1)


@pytest.mark.night
def test_steps_are_the_same_under_every_layout(
    model: Path, session_redis: RedisServer, redis_url: str, tmp_path: Path, alone: None
) -> None:
    jobs = {}
    for number, ((mode, way), parallel) in enumerate(WAYS.items()):
        config = config_of(model, mode, ranks=2, **parallel)
        jobs[mode, way] = prepare_run(redis_url, number + 1, config, tmp_path / mode / way)
    results = run_world(list(jobs.values()), 2, tmp_path / "world")
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    alone_on_one_rank = {}
    for number, mode in enumerate(MODES):
        shut_down()
        job = prepare_run(redis_url, number + 1, config_of(model, mode), tmp_path / mode / "alone")
        alone_on_one_rank[mode] = job, run_job(job)
    for (key, job), ranks in zip(jobs.items(), results, strict=True):
        expected_job, expected = alone_on_one_rank[key[0]]
        (ours,), (theirs,) = ranks[0]["ledger"], expected["ledger"]
        for name in ("loss", "grad_norm", "ratio"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=2e-3, abs=1e-4), (key, name)
        # A prompt that its group's cut repeats counts again, and padding isn't replayed.
        replaced = theirs.metrics["expert_replaced"]
        assert ours.metrics["expert_replaced"] == pytest.approx(replaced, rel=0.1, abs=0.02), key
        found = recorded(job, ranks[0])
        for name, experts in recorded(expected_job, expected).items():
            np.testing.assert_array_equal(np.sort(found[name], -1), np.sort(experts, -1), err_msg=f"{key} {name}")
        tensors = {name: tensor for rank in ranks for name, tensor in rank["tensors"].items()}
        assert tensors.keys() == expected["tensors"].keys()
        for name, tensor in expected["tensors"].items():
            np.testing.assert_allclose(tensors[name], tensor, atol=2e-4, err_msg=f"{key} {name}")
