"""The services of reference and teacher as processes, on a real board: the trainer's own way of running a model."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from relaxd.board import CANDIDATES, REF_LOGPROBS, TEACHER_CANDIDATE_LOGPROBS, TEACHER_LOGPROBS
from relaxd.config import ReferenceConfig, RolesConfig, RunConfig
from relaxd.roles import REFERENCE, ROLES, TEACHER
from relaxd.v1 import coordinator_pb2, replica_pb2
from tests.integration.trainer.service_kit import PATIENCE, Feeder, ScriptedCoordinator, TrainerProcess, make_config
from tests.integration.trainer.trainer_worlds import make_model

TEMPERATURE = 0.8
TOP_K = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", tied=True)


def reference_config(model: Path, **sizes: int) -> RunConfig:
    return make_config(
        model,
        algorithm={"kl_coef": 0.1},
        rollout={"samples_per_prompt": 3, "temperature": TEMPERATURE},
        roles={"reference": {"placement": "service", "threads": 1, **sizes}},
    )


def teacher_config(model: Path, teacher: Path, top_k: int = 0, **sizes: int) -> RunConfig:
    return make_config(
        model,
        algorithm={"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0, "distill_top_k": top_k},
        rollout={"samples_per_prompt": 3, "temperature": TEMPERATURE},
        roles={"teacher": {"model": str(teacher), "threads": 1, **sizes}},
    )


@contextmanager
def frozen_service(
    config: RunConfig, redis_url: str, folder: Path, role: str = REFERENCE
) -> Iterator[tuple[ScriptedCoordinator, Feeder, TrainerProcess]]:
    feeder, coordinator = Feeder(redis_url, config), ScriptedCoordinator(config, folder, role)
    process = TrainerProcess(coordinator, redis_url, module=ROLES[role].module)
    try:
        yield coordinator, feeder, process
    finally:
        process.close()
        coordinator.close()
        feeder.board.close()


def wait_until_ready(coordinator: ScriptedCoordinator) -> None:
    coordinator.wait(lambda: coordinator.status.state == replica_pb2.REPLICA_STATE_READY)


def trained_columns(feeder: Feeder, count: int) -> dict[str, dict[str, Any]]:
    """What the trainer gets of the next groups, by group id."""
    board, found = feeder.board, {}
    while len(found) < count:
        deliveries = board.take("train", "trainer", count=count, block_seconds=PATIENCE)
        assert deliveries
        loaded = board.load(deliveries, board.needs("train"))
        found |= {delivery.group_id: columns for delivery, columns in zip(deliveries, loaded, strict=True)}
    return found


@pytest.mark.parametrize(("role", "top_k"), [(REFERENCE, 0), (TEACHER, 0), (TEACHER, TOP_K)])
def test_log_probs_are_those_of_transformers(
    model: Path, redis_url: str, tmp_path: Path, role: str, top_k: int
) -> None:
    """The teacher is a larger model of another architecture, on two ranks."""
    frozen, sizes, config = model, {}, reference_config(model)
    if role == TEACHER:
        frozen, sizes = make_model(tmp_path / "teacher", "llama", num_hidden_layers=3), {"tensor_parallel": 2}
        config = teacher_config(model, frozen, top_k, **sizes)
    mask = np.tile(np.array([1, 1, 0, 1, 1, 1], np.uint8), 3)
    with frozen_service(config, redis_url, tmp_path, role) as (coordinator, feeder, process):
        groups = feeder.feed(5, 0, loss_mask=mask)
        wait_until_ready(coordinator)
        found = trained_columns(feeder, 5)
        coordinator.wait(lambda: coordinator.status.done_groups == 5 and not coordinator.status.held_groups)
        assert coordinator.status.gauges["ranks"] == sizes.get("tensor_parallel", 1)
        assert process.stop() == 0
    exact_model = transformers.AutoModelForCausalLM.from_pretrained(frozen, dtype=torch.float64)
    assert found.keys() == set(groups)
    for columns in found.values():
        logprobs = columns.get({REFERENCE: REF_LOGPROBS, TEACHER: TEACHER_LOGPROBS}[role])
        assert (logprobs is None) == bool(top_k)
        prompt = torch.from_numpy(columns["prompt_tokens"].astype(np.int64))
        for sample in np.split(np.arange(18), 3):
            answer = torch.from_numpy(columns["tokens"][sample].astype(np.int64))
            with torch.no_grad():
                logits = exact_model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            exact_logprobs = logits.log_softmax(-1)
            if logprobs is not None:
                assert (logprobs.dtype, logprobs.shape) == (np.float32, columns["tokens"].shape)
                expected = exact_logprobs.gather(-1, answer[:, None])[:, 0].numpy() * mask[sample]
                np.testing.assert_allclose(logprobs[sample], expected, atol=1e-4)
                continue
            values, ids = exact_logprobs.topk(top_k)
            found, found_ids = columns[TEACHER_CANDIDATE_LOGPROBS][sample], columns[CANDIDATES][sample]
            assert (found.dtype, found_ids.dtype) == (np.float32, np.int32)
            np.testing.assert_array_equal(found_ids, np.where(mask[sample, None], ids.numpy(), -1))
            np.testing.assert_allclose(found, values.numpy() * mask[sample, None], atol=1e-4)


def test_a_rank_that_dies_ends_the_replica_and_its_groups_go_to_the_next(
    model: Path, redis_url: str, tmp_path: Path
) -> None:
    config = reference_config(model)
    with frozen_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        wait_until_ready(coordinator)
        os.kill(process.rank_pid(), signal.SIGKILL)
        assert process.process.wait(30) == 1  # a supervisor starts the next
        groups = feeder.feed(3, 0)
        following = TrainerProcess(coordinator, redis_url, module=ROLES[REFERENCE].module)
        try:
            assert trained_columns(feeder, 3).keys() == set(groups)
            # A run that is over frees the model; one that needs no reference loads none.
            coordinator.set_state(coordinator_pb2.RUN_STATE_STOPPED)
            coordinator.wait(lambda: coordinator.status.state == replica_pb2.REPLICA_STATE_IDLE)
            other = make_config(model)
            coordinator.assignment = coordinator_pb2.Assignment(
                run_id="run-2", config_json=other.model_dump_json(), state=coordinator_pb2.RUN_STATE_RUNNING
            )
            wait_until_ready(coordinator)
            assert coordinator.status.detail == "this run needs no reference service"
            assert coordinator.status.gauges["ranks"] == 0
            # A model whose log-probs would be those of other tokens is refused.
            stranger = make_model(tmp_path / "stranger", "qwen3", vocab_size=100)
            other = reference_config(model).model_copy(
                update={"roles": RolesConfig(reference=ReferenceConfig(model=str(stranger), placement="service"))}
            )
            coordinator.assignment = coordinator_pb2.Assignment(
                run_id="run-3", config_json=other.model_dump_json(), state=coordinator_pb2.RUN_STATE_RUNNING
            )
            coordinator.wait(lambda: coordinator.status.state == replica_pb2.REPLICA_STATE_FAILED)
            assert "has another vocabulary than model.path" in coordinator.status.detail
            assert "roles.reference.model" in coordinator.status.detail
            assert following.stop() == 0
        finally:
            following.close()
