"""The services of reference and teacher as processes, on a real board: the trainer's own way of running a model."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from relaxd.board import (
    CANDIDATES,
    REF_LOGPROBS,
    STUDENT_CANDIDATES,
    TEACHER_CANDIDATE_LOGPROBS,
    TEACHER_LOGPROBS,
)
from relaxd.config import ReferenceConfig, RolesConfig, RunConfig
from relaxd.roles import REFERENCE, ROLES, TEACHER
from relaxd.v1 import coordinator_pb2, replica_pb2
from tests.integration.trainer.service_kit import TrainerProcess, make_config, trained_columns, trainer_service
from tests.integration.trainer.trainer_worlds import VOCAB, make_model

TEMPERATURE = 0.8
TOP_K = 5
MASK = np.tile(np.array([1, 1, 0, 1, 1, 1], np.uint8), 3)
TOKENIZER = Tokenizer(models.WordLevel({str(id): id for id in range(200)}, unk_token="0")).to_str()


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


def teacher_config(model: Path, teacher: Path, **sizes: int) -> RunConfig:
    return make_config(
        model,
        algorithm={"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0},
        rollout={"samples_per_prompt": 3, "temperature": TEMPERATURE},
        roles={"teacher": {"model": str(teacher), "threads": 1, **sizes}},
    )


@pytest.mark.parametrize("role", [REFERENCE, TEACHER])
def test_log_probs_are_those_of_transformers(model: Path, redis_url: str, tmp_path: Path, role: str) -> None:
    """The teacher is a larger model of another architecture, on two ranks."""
    frozen, sizes, config = model, {}, reference_config(model)
    if role == TEACHER:
        frozen, sizes = make_model(tmp_path / "teacher", "llama", num_hidden_layers=3), {"tensor_parallel": 2}
        config = teacher_config(model, frozen, **sizes)
    with trainer_service(config, redis_url, tmp_path, role=role) as (coordinator, feeder, process):
        groups = feeder.feed(5, 0, loss_mask=MASK)
        coordinator.wait_until_ready()
        found = trained_columns(feeder, 5)
        coordinator.wait(lambda: coordinator.status.done_groups == 5 and not coordinator.status.held_groups)
        assert coordinator.status.gauges["ranks"] == sizes.get("tensor_parallel", 1)
        assert process.stop() == 0
    exact = transformers.AutoModelForCausalLM.from_pretrained(frozen, dtype=torch.float64)
    assert found.keys() == set(groups)
    for columns in found.values():
        logprobs = columns[{REFERENCE: REF_LOGPROBS, TEACHER: TEACHER_LOGPROBS}[role]]
        assert (logprobs.dtype, logprobs.shape) == (np.float32, columns["tokens"].shape)
        for sample, answer, of_vocabulary in answers(exact, columns, columns["prompt_tokens"]):
            expected = of_vocabulary.gather(-1, answer[:, None])[:, 0].numpy() * MASK[sample]
            np.testing.assert_allclose(logprobs[sample], expected, atol=1e-4)


@pytest.mark.slow
def test_several_teachers_with_prompts_of_their_own_give_candidates(
    model: Path, redis_url: str, tmp_path: Path
) -> None:
    """Groups of two sources in turn go to two teachers of different sizes. Those of a third source have none."""
    of_source = {
        "source-0": make_model(tmp_path / "llama", "llama", num_hidden_layers=3),
        "source-1": make_model(tmp_path / "qwen3", "qwen3", vocab_size=200),
    }
    config = make_config(
        model,
        algorithm={"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0, "distill_top_k": TOP_K},
        rollout={"samples_per_prompt": 3, "temperature": TEMPERATURE},
        roles={
            "teacher": {
                "models": [{"model": str(folder), "sources": [name]} for name, folder in of_source.items()],
                "privileged_key": "answer",
                "tensor_parallel": 2,
                "threads": 1,
            }
        },
    )
    # The service compares vocabularies by their sizes, as these models have no tokenizer: let them be the same words.
    for folder in (model, *of_source.values()):
        (folder / "tokenizer.json").write_text(TOKENIZER)
    tokens = np.random.default_rng(4).integers(3, 200, 18).astype(np.int32)
    with trainer_service(config, redis_url, tmp_path, role=TEACHER) as (coordinator, feeder, process):
        groups = feeder.feed(4, 0, loss_mask=MASK, tokens=tokens)
        (stray,) = feeder.publish(source="nowhere")
        feeder.finish(feeder.begin(1, 0), 0, loss_mask=MASK, tokens=tokens)
        coordinator.wait_until_ready()
        found = trained_columns(feeder, 4)
        coordinator.wait(lambda: coordinator.status.done_groups == 5 and not coordinator.status.held_groups)
        (dropped,) = feeder.board.dropped()
        assert process.stop() == 0
    for folder in (model, *of_source.values()):
        (folder / "tokenizer.json").unlink()
    assert found.keys() == set(groups)
    assert (dropped.group_id, dropped.reason) == (stray, "no_logprobs")
    assert 'roles.teacher.models list source-0, source-1, but the group is of the source "nowhere"' in dropped.detail
    exact = {
        name: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for name, folder in of_source.items()
    }
    assert {columns["prompt"]["metadata"]["data_source"] for columns in found.values()} == set(exact)
    for group_id, columns in found.items():
        teacher = exact[columns["prompt"]["metadata"]["data_source"]]
        prompt = np.arange(40, 49) + int(group_id[1:]) % 5
        ids, logprobs = columns[CANDIDATES], columns[TEACHER_CANDIDATE_LOGPROBS]
        assert (ids.dtype, logprobs.dtype, ids.shape) == (np.int32, np.float32, (18, TOP_K))
        for sample, _, of_vocabulary in answers(teacher, columns, prompt):
            likeliest = of_vocabulary.topk(TOP_K)
            np.testing.assert_array_equal(ids[sample], np.where(MASK[sample, None] != 0, likeliest.indices.numpy(), -1))
            expected = likeliest.values.numpy() * MASK[sample, None]
            np.testing.assert_allclose(logprobs[sample], expected, atol=1e-4)


@pytest.mark.slow
def test_a_teacher_is_asked_about_what_the_student_finds_likeliest(model: Path, redis_url: str, tmp_path: Path) -> None:
    """On two ranks, with a prompt of its own: the union of both models' likeliest tokens, each of them once."""
    folder = make_model(tmp_path / "teacher", "llama", num_hidden_layers=3)
    config = make_config(
        model,
        algorithm={
            "name": "opd",
            "distill_coef": 0.0,
            "distill_loss_coef": 1.0,
            "distill_top_k": TOP_K,
            "distill_candidates": "union",
        },
        rollout={"samples_per_prompt": 3, "temperature": TEMPERATURE},
        roles={
            "teacher": {"model": str(folder), "privileged_key": "answer", "tensor_parallel": 2, "threads": 1},
        },
    )
    random = np.random.default_rng(5)
    told = np.stack([random.permutation(VOCAB)[:TOP_K] for _ in MASK]).astype(np.int32)
    with trainer_service(config, redis_url, tmp_path, role=TEACHER) as (coordinator, feeder, process):
        groups = feeder.feed(3, 0, loss_mask=MASK, student_candidates=told)
        (narrow,) = feeder.publish()
        feeder.finish(feeder.begin(1, 0), 0, loss_mask=MASK, student_candidates=told[:, :-1])
        coordinator.wait_until_ready()
        found = trained_columns(feeder, 3)
        coordinator.wait(lambda: coordinator.status.done_groups == 4 and not coordinator.status.held_groups)
        (dropped,) = feeder.board.dropped()
        assert process.stop() == 0
    assert (dropped.group_id, dropped.reason) == (narrow, "malformed")
    assert "student_candidates is int32 [18, 4]: it must be integers [18, 5]" in dropped.detail
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert found.keys() == set(groups)
    for group_id, columns in found.items():
        assert STUDENT_CANDIDATES not in columns
        ids, logprobs = columns[CANDIDATES], columns[TEACHER_CANDIDATE_LOGPROBS]
        assert (ids.dtype, logprobs.dtype, ids.shape) == (np.int32, np.float32, (18, 2 * TOP_K))
        prompt = np.arange(40, 49) + int(group_id[1:]) % 5
        for sample, _, of_vocabulary in answers(exact, columns, prompt):
            likeliest = of_vocabulary.topk(TOP_K).indices.numpy()
            repeated = (told[sample][:, :, None] == likeliest[:, None, :]).any(-1)
            both = np.concatenate([likeliest, np.where(repeated, -1, told[sample])], 1)
            both = np.where(MASK[sample, None] != 0, both, -1)
            np.testing.assert_array_equal(ids[sample], both)
            expected = of_vocabulary.gather(-1, torch.from_numpy(both).long().clamp(min=0)).numpy() * (both >= 0)
            np.testing.assert_allclose(logprobs[sample], expected, atol=1e-4)


def answers(
    exact: Any, columns: dict[str, Any], prompt_tokens: np.ndarray
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """The place and the tokens of each answer, and the log-probs of the whole vocabulary for each of them."""
    prompt = torch.from_numpy(prompt_tokens.astype(np.int64))
    for sample in np.split(np.arange(18), 3):
        answer = torch.from_numpy(columns["tokens"][sample].astype(np.int64))
        with torch.no_grad():
            logits = exact(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        yield sample, answer, logits.log_softmax(-1)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_replica_and_its_groups_go_to_the_next(
    model: Path, redis_url: str, tmp_path: Path
) -> None:
    config = reference_config(model)
    with trainer_service(config, redis_url, tmp_path, role=REFERENCE) as (coordinator, feeder, process):
        coordinator.wait_until_ready()
        os.kill(process.rank_pid(), signal.SIGKILL)
        assert process.process.wait(60) == 1  # a supervisor starts the next
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
            coordinator.wait_until_ready()
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
