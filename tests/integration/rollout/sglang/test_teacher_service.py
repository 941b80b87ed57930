"""The teacher as an SGLang engine: the service as a process, on a real board, with the real SGLang."""

import os
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers

from relaxd.board import CANDIDATES, TEACHER_CANDIDATE_LOGPROBS, TEACHER_LOGPROBS
from relaxd.config import RunConfig
from relaxd.roles import ROLES, TEACHER
from relaxd.v1 import coordinator_pb2, replica_pb2
from tests.integration.trainer.service_kit import (
    Feeder,
    ScriptedCoordinator,
    TrainerProcess,
    make_config,
    trained_columns,
    trainer_service,
)
from tests.kit.models import make_tiny_model
from tests.sglang.environment import CPU_ENVIRONMENT, CPU_OPTIONS

MODULE = ROLES[TEACHER].modules["sglang"]
TEMPERATURE = 0.8
TOP_K = 5
SAMPLES = 3
QUIET_SECONDS = 4.0
MASK = np.tile(np.array([0, 1, 1, 0, 1, 1], np.uint8), SAMPLES)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model than the student, with more tokens in its output layer."""
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, num_hidden_layers=3, vocab_size=272)


def opd(model: Path, teacher: Path, *, sglang: dict[str, Any] | None = None, **algorithm: Any) -> RunConfig:
    section = {
        "model": str(teacher),
        "engine": "sglang",
        "threads": 1,
        "memory_fraction": 0.3,
        "sglang": CPU_OPTIONS | (sglang or {}),
        **({"privileged_key": "answer"} if "distill_top_k" in algorithm else {}),
    }
    return make_config(
        model,
        run={"steps": 10},
        algorithm={"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0, **algorithm},
        rollout={"samples_per_prompt": SAMPLES, "temperature": TEMPERATURE},
        roles={"teacher": section},
    )


def teacher_service(
    config: RunConfig, redis_url: str, folder: Path, python: str
) -> AbstractContextManager[tuple[ScriptedCoordinator, Feeder, TrainerProcess]]:
    environment = {**CPU_ENVIRONMENT, "RELAXD_ENGINE_PYTHON": python}
    return trainer_service(config, redis_url, folder, environment, TEACHER, MODULE)


def of_vocabulary(exact: Any, prompt: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    """[L, vocabulary]: log-probs in the places of an answer's tokens."""
    whole = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    with torch.inference_mode():
        return (exact(whole[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)


def test_log_probs_are_those_of_transformers(
    model: Path, teacher: Path, python: str, redis_url: str, tmp_path: Path
) -> None:
    """Of long and short answers. One that the engine can't take drops its group, which says so; the others go on."""
    config = opd(model, teacher, sglang={"context_length": 256, "chunked_prefill_size": 64})
    with teacher_service(config, redis_url, tmp_path, python) as (coordinator, feeder, process):
        groups = feeder.feed(4, 0, loss_mask=MASK)
        groups += feeder.feed(2, 0, length=200)
        (too_long,) = feeder.feed(1, 0, length=252)
        coordinator.wait_for_detail("loading")
        coordinator.wait_until_ready()
        found = trained_columns(feeder, 6)
        coordinator.wait(lambda: coordinator.status.done_groups == 7 and not coordinator.status.held_groups)
        coordinator.wait(lambda: coordinator.status.gauges["prefilled_tokens"] > 6 * 200)
        before = coordinator.status.progress
        coordinator.wait(lambda: coordinator.status.progress > before)  # also without groups
        assert not coordinator.status.gauges["tokens_in_flight"]
        (dropped,) = feeder.board.dropped()
        assert process.stop() == 0
    assert (dropped.group_id, dropped.reason) == (too_long, "too_long")
    assert "the teacher's engine takes at most 256" in dropped.detail
    exact = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    assert found.keys() == set(groups)
    for columns in found.values():
        tokens, logprobs = columns["tokens"], columns[TEACHER_LOGPROBS]
        assert (logprobs.dtype, logprobs.shape) == (np.float32, tokens.shape)
        for answer, mask, own in zip(
            *(np.split(one, SAMPLES) for one in (tokens, columns["loss_mask"], logprobs)), strict=True
        ):
            expected = of_vocabulary(exact, columns["prompt_tokens"], answer)
            expected = expected.gather(-1, torch.from_numpy(answer.astype(np.int64))[:, None])[:, 0].numpy() * mask
            np.testing.assert_allclose(own, expected, atol=1e-4)


def test_candidates_of_a_teacher_with_prompts_of_its_own(
    model: Path, teacher: Path, python: str, redis_url: str, tmp_path: Path
) -> None:
    with teacher_service(opd(model, teacher, distill_top_k=TOP_K), redis_url, tmp_path, python) as (
        coordinator,
        feeder,
        process,
    ):
        groups = feeder.feed(4, 0, loss_mask=MASK)
        found = trained_columns(feeder, 4)
        coordinator.wait(lambda: coordinator.status.done_groups == 4)
        assert process.stop() == 0
    assert found.keys() == set(groups)
    exact = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    without = 0
    for group_id, columns in found.items():
        assert TEACHER_LOGPROBS not in columns
        prompt = np.arange(40, 49) + int(group_id[1:]) % 5
        ids, logprobs = columns[CANDIDATES], columns[TEACHER_CANDIDATE_LOGPROBS]
        assert (ids.dtype, logprobs.dtype, ids.shape) == (np.int32, np.float32, (18, TOP_K))
        for sample in np.split(np.arange(18), SAMPLES):
            likeliest = of_vocabulary(exact, prompt, columns["tokens"][sample]).topk(TOP_K)
            of_student = (likeliest.indices.numpy() < 259) & (MASK[sample, None] != 0)
            without += np.count_nonzero(~of_student[MASK[sample] != 0])
            np.testing.assert_array_equal(ids[sample], np.where(of_student, likeliest.indices.numpy(), -1))
            np.testing.assert_allclose(logprobs[sample], likeliest.values.numpy() * of_student, atol=1e-4)
    assert without  # some of the teacher's likeliest tokens aren't the student's


def test_an_engine_that_is_killed_ends_the_replica_and_its_groups_go_to_the_next(
    model: Path, teacher: Path, python: str, redis_url: str, tmp_path: Path
) -> None:
    config = opd(model, teacher)
    with teacher_service(config, redis_url, tmp_path, python) as (coordinator, feeder, process):
        coordinator.wait_until_ready()
        (engine,) = psutil.Process(process.process.pid).children()
        family = [engine, *engine.children(recursive=True)]
        for scheduler in family[1:]:
            os.kill(scheduler.pid, signal.SIGSTOP)
        groups = feeder.feed(3, 0, length=200)
        coordinator.wait(lambda: coordinator.status.gauges["tokens_in_flight"] > 200)
        coordinator.wait(lambda: coordinator.status.held_groups >= 2)
        # What hangs makes no progress, by which the coordinator knows it.
        begun, before = time.monotonic(), coordinator.status.progress
        while time.monotonic() - begun < QUIET_SECONDS:
            time.sleep(0.2)
            assert coordinator.status.progress <= before + 1  # a report may have been on its way
        os.kill(engine.pid, signal.SIGKILL)
        assert process.process.wait(60) == 1  # a supervisor starts the next
        assert not psutil.wait_procs(family, timeout=60)[1]
        following = TrainerProcess(
            coordinator, redis_url, {**CPU_ENVIRONMENT, "RELAXD_ENGINE_PYTHON": python}, module=MODULE
        )
        try:
            assert trained_columns(feeder, 3).keys() == set(groups)
            # A run that is over frees the model; one that needs no teacher loads none.
            coordinator.set_state(coordinator_pb2.RUN_STATE_STOPPED)
            coordinator.wait(lambda: coordinator.status.state == replica_pb2.REPLICA_STATE_IDLE)
            assert not psutil.Process(following.process.pid).children()
            coordinator.assignment = assignment("run-2", make_config(model))
            coordinator.wait_until_ready()
            assert coordinator.status.detail == "this run needs no teacher service"
            assert following.stop() == 0
        finally:
            following.close()


def test_what_can_not_be_a_teacher_is_refused(
    model: Path, teacher: Path, python: str, redis_url: str, tmp_path: Path
) -> None:
    """Another vocabulary, a setting that SGLang hasn't, and a run whose teacher is in ranks of Megatron."""
    stranger = make_tiny_model(tmp_path / "stranger")
    (stranger / "tokenizer.json").write_text((stranger / "tokenizer.json").read_text().replace("endoftext", "eot"))
    cases = {
        "has another vocabulary than model.path": opd(model, stranger),
        "roles.teacher.sglang.chunked_size is not an option": opd(model, teacher, sglang={"chunked_size": 5}),
        "algorithm.distill_top_k is 300, but the teacher and the trained model have only 259": opd(
            model, teacher, distill_top_k=300
        ),
        'roles.teacher.engine is "megatron", but this replica is services.rollout.teacher': opd(
            model, teacher
        ).model_copy(update={"roles": make_config(model, roles={"teacher": {"model": str(teacher)}}, **OPD).roles}),
    }
    with teacher_service(next(iter(cases.values())), redis_url, tmp_path, python) as (coordinator, _, process):
        for number, (problem, config) in enumerate(cases.items()):
            coordinator.assignment = assignment(f"run-{number}", config)
            coordinator.wait_for_detail(problem)
        assert process.stop() == 0


OPD: dict[str, Any] = {"algorithm": {"name": "opd"}}


def assignment(run_id: str, config: RunConfig) -> coordinator_pb2.Assignment:
    return coordinator_pb2.Assignment(
        run_id=run_id, config_json=config.model_dump_json(), state=coordinator_pb2.RUN_STATE_RUNNING
    )
