"""Reference and teacher in the trainer's ranks: candidates of both models, prompts of their own, weights taken over."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from relaxd.board import Board, stages_for
from relaxd.config import RunConfig
from services.trainer.batch.micro_batch import pack
from services.trainer.batch.step_plan import read_committed
from services.trainer.offline.replay import replay
from tests.integration.trainer.reference_models.reference_kit import log_softmax
from tests.integration.trainer.service_kit import RUN_ID, Feeder, make_config
from tests.integration.trainer.trainer_worlds import (
    Job,
    make_learner,
    make_model,
    make_samples,
)
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.megatron_world import shut_down

pytestmark = pytest.mark.usefixtures("alone")
TOP_K = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The student, and a teacher of another architecture with fewer tokens."""
    root = tmp_path_factory.mktemp("models")
    return {
        "student": make_model(root / "student", "qwen3", tied=True),
        "teacher": make_model(root / "teacher", "llama", num_hidden_layers=3, vocab_size=251),
    }


@pytest.mark.parametrize("of", ["teacher", "student", "union"])
def test_candidates_and_their_divergence_are_those_of_transformers(models: dict[str, Path], of: str) -> None:
    samples = [replace(one, tokens=one.tokens % 251) for one in make_samples(7)]
    batch = pack(samples)
    settings = {"distill_loss_coef": 0.5, "distill_top_k": TOP_K, "distill_candidates": of}
    made = make_learner(
        Job(
            models["student"],
            algorithm={**settings, "name": "opd", "distill_coef": 0.0},
            frozen={"teacher": {"": models["teacher"]}},
        )
    )
    student, teacher = (log_softmax(models[name], samples) for name in ("student", "teacher"))
    likeliest = {
        "teacher": teacher.topk(TOP_K).indices.numpy(),
        "student": student[:, :251].topk(TOP_K).indices.numpy(),
    }
    sets = [
        {*(likeliest["teacher"][t] if of != "student" else ()), *(likeliest["student"][t] if of != "teacher" else ())}
        for t in range(len(student))
    ]

    (columns,) = made.frozen_columns([batch])
    trained = batch.loss_mask != 0
    ids, logprobs = columns["candidates"][trained], columns["teacher_candidate_logprobs"][trained]
    assert (ids.dtype, ids.shape[1]) == (np.int32, 2 * TOP_K if of == "union" else TOP_K)
    assert (columns["candidates"][~trained] == -1).all()
    for t, expected in enumerate(sets):
        present = ids[t] >= 0
        assert sorted(ids[t][present]) == sorted(expected)
        np.testing.assert_allclose(logprobs[t][present], teacher[t][ids[t][present]].numpy(), atol=1e-4)
        assert not logprobs[t][~present].any()

    made.accumulate([batch])
    stats = made.finish(float(trained.sum()))
    reverse = 0.0
    for t, candidates in enumerate(sets):
        p, q = (one[t].exp().numpy() for one in (student, teacher))
        own = sorted(candidates)
        p, q = np.append(p[own], 1 - p[own].sum()), np.append(q[own], 1 - q[own].sum())
        reverse += float((p * np.log(p / q)).sum())
    assert stats.metrics["teacher_kl"] == pytest.approx(reverse / trained.sum(), rel=1e-4)
    if of == "union":
        shared = np.mean([2 * TOP_K - len(one) for one in sets]) / TOP_K
        assert stats.metrics["candidate_overlap"] == pytest.approx(shared)


@pytest.mark.parametrize("of", ["student", "union"])
def test_a_service_that_is_told_the_students_candidates_gives_what_the_trainers_teacher_gives(
    models: dict[str, Path], of: str
) -> None:
    """The same columns, bit for bit, and so the same step; tokens that the teacher lacks are no candidates."""
    samples = [replace(one, tokens=one.tokens % 251) for one in make_samples(7)]
    batch = pack(samples)
    settings = {"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 0.5, "distill_top_k": TOP_K}
    job = Job(
        models["student"],
        algorithm=settings | {"distill_candidates": of},
        frozen={"teacher": {"": models["teacher"]}},
    )
    made = make_learner(job)
    (teacher,) = made._frozen
    (in_trainer,) = made.frozen_columns([batch])
    trained = np.flatnonzero(batch.loss_mask)
    student = log_softmax(models["student"], samples)

    def from_service(ids: torch.Tensor) -> dict[str, Any]:
        told = np.full((len(batch.tokens), TOP_K), 7, np.int32)  # where loss_mask is 0 it may be anything
        told[trained] = ids.numpy()
        (columns,) = teacher.compute([replace(batch, columns={**batch.columns, "student_candidates": told})])
        return columns

    columns = from_service(student[:, :251].topk(TOP_K).indices)
    assert columns.keys() == in_trainer.keys()
    for name, values in columns.items():
        np.testing.assert_array_equal(values, in_trainer[name])

    made.accumulate([batch])
    stats = made.finish(float(len(trained)))
    shut_down()
    other = make_learner(replace(job, frozen={}))
    other.accumulate([replace(batch, columns={**batch.columns, **columns})])
    found = other.finish(float(len(trained)))
    for name in ("teacher_kl", "student_candidate_mass", "teacher_candidate_mass"):
        assert found.metrics[name] == stats.metrics[name]
    assert found.grad_norm == stats.grad_norm > 0

    shut_down()
    (teacher,) = make_learner(job)._frozen
    whole = student.topk(TOP_K).indices
    assert (whole >= 251).any()
    own = from_service(whole)["candidates"][trained][:, -TOP_K:]
    expected = np.where(whole.numpy() < 251, whole.numpy(), -1)
    if of == "student":
        np.testing.assert_array_equal(own, expected)
    else:
        assert ((own == expected) | (own == -1)).all()
    with pytest.raises(ValueError, match="a micro-batch has no column 'student_candidates'"):
        teacher.compute([batch])


def config_of(student: Path, roles: dict[str, Any], algorithm: dict[str, Any], **trainer: Any) -> RunConfig:
    """Four steps of one group."""
    return make_config(
        student,
        run={"steps": 4},
        trainer={"groups_per_step": 1, "optimizer": {"lr": 1e-2}, "checkpoint": {"every": 0}, **trainer},
        algorithm=algorithm,
        roles=roles,
        board={"max_staleness": 8},
    )


def prepare_run(redis_url: str, number: int, config: RunConfig, folder: Path, stray: str = "") -> RunJob:
    """A run whose groups all wait for it, in a database of its own; the first may be of a source of its own."""
    folder.mkdir(parents=True)
    url = redis_url.removesuffix("/0") + f"/{number}"
    feeder = Feeder(url, config)
    if stray:
        feeder.publish(source=stray)
        feeder.finish(feeder.begin(1, 0), 0)
    for length in (6, 9, 4, 11):
        feeder.feed(1, 0, length=length)
    feeder.board.close()
    return RunJob(config, url, folder)


IN_LOSS = {"distill_coef": 0.0, "distill_loss_coef": 1.0}


@pytest.mark.parametrize(
    ("mini_batches", "form"),
    [(1, IN_LOSS), (2, IN_LOSS), (1, {"student_logprobs": "rollout"})],
    ids=["one update", "two updates", "in the advantages"],
)
def test_a_teacher_with_prompts_of_its_own_sees_the_same_answers(
    models: dict[str, Path], redis_url: str, tmp_path: Path, mini_batches: int, form: dict[str, Any]
) -> None:
    """Self-distillation: the teacher is the initial model, and its column is in the step file for every replay."""
    student = models["student"]
    config = config_of(
        student,
        {"teacher": {"model": str(student), "placement": "trainer", "privileged_key": "answer"}},
        {"name": "opd", "old_logprobs": "current", **form},
        groups_per_step=2,
        mini_batches=mini_batches,
    ).model_copy(update={"run": make_config(student, run={"steps": 2}).run})
    job = prepare_run(redis_url, 1, config, tmp_path / "run")
    trained = run_job(job)
    model = transformers.AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64)
    for entry in trained["ledger"]:
        for columns in read_committed(tmp_path / "run", entry.step, entry.plan).groups.values():
            prompt, begin = torch.from_numpy(columns["teacher_prompt_tokens"].astype(np.int64)), 0
            assert len(prompt) == 9
            for length in columns["lengths"].tolist():
                answer = torch.from_numpy(columns["tokens"][begin : begin + length].astype(np.int64))
                with torch.no_grad():
                    logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
                expected = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0].numpy()
                np.testing.assert_allclose(columns["teacher_logprobs"][begin : begin + length], expected, atol=1e-4)
                begin += length
            if form != IN_LOSS:
                towards_teacher = columns["teacher_logprobs"] - columns["rollout_logprobs"]
                np.testing.assert_allclose(columns["advantages"], towards_teacher, atol=1e-6)
    shut_down()
    assert same(run_job(job), trained)


@pytest.mark.parametrize(("of", "mini_batches"), [("", 1), ("union", 2)], ids=["sampled tokens", "candidates"])
def test_several_teachers_judge_the_groups_of_their_sources(
    models: dict[str, Path], redis_url: str, tmp_path: Path, of: str, mini_batches: int
) -> None:
    """Groups of two sources share micro-batches, but not a teacher. One of a third source is dropped."""
    of_source = {"source-0": models["teacher"], "source-1": models["student"]}
    candidates = {"distill_top_k": TOP_K, "distill_candidates": of} if of else {}
    config = config_of(
        models["student"],
        {
            "teacher": {
                "models": [{"model": str(folder), "sources": [name]} for name, folder in of_source.items()],
                "placement": "trainer",
            }
        },
        {"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0, "old_logprobs": "current", **candidates},
        groups_per_step=2,
        mini_batches=mini_batches,
    )
    job = prepare_run(redis_url, 1, config, tmp_path / "run", stray="nowhere")
    job = replace(job, config=config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})}))
    trained = run_job(job)
    board = Board(job.redis_url, RUN_ID, stages_for(config), config.board)
    (dropped,) = board.dropped()
    board.close()
    assert (dropped.group_id, dropped.reason) == ("g1", "no_logprobs")
    assert 'roles.teacher.models list source-0, source-1, but the group is of the source "nowhere"' in dropped.detail

    exact = {
        name: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for name, folder in of_source.items()
    }
    for entry in trained["ledger"]:
        groups = read_committed(tmp_path / "run", entry.step, entry.plan).groups.values()
        assert {columns["prompt"]["metadata"]["data_source"] for columns in groups} == set(of_source)
        for columns in groups:
            teacher = exact[columns["prompt"]["metadata"]["data_source"]]
            prompt = torch.from_numpy(columns["prompt_tokens"].astype(np.int64))
            begin = 0
            for length in columns["lengths"].tolist():
                own = slice(begin, begin := begin + length)
                answer = torch.from_numpy(columns["tokens"][own].astype(np.int64))
                with torch.no_grad():
                    logits = teacher(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
                logprobs = logits.log_softmax(-1)
                if not of:
                    found, ids = columns["teacher_logprobs"][own][:, None], answer[:, None]
                else:
                    found = columns["teacher_candidate_logprobs"][own]
                    ids = torch.from_numpy(columns["candidates"][own])
                    np.testing.assert_array_equal(ids[:, :TOP_K], logprobs.topk(TOP_K).indices)
                expected = logprobs.gather(-1, ids.long().clamp(min=0)) * (ids >= 0)
                np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
    shut_down()
    assert same(run_job(job), trained)


REFRESHED = {"reference": {"refresh_every": 2}}
WITH_KL = {"kl_coef": 0.3, "kl_estimator": "k2"}


def test_a_reference_takes_over_the_weights_at_the_same_steps_in_every_replay(
    models: dict[str, Path], redis_url: str, tmp_path: Path
) -> None:
    config, folder = config_of(models["student"], REFRESHED, WITH_KL), tmp_path / "run"
    job = prepare_run(redis_url, 1, config, folder)
    trained = run_job(job)
    kl = [entry.metrics["kl"] for entry in trained["ledger"]]
    assert [value < 1e-9 for value in kl] == [True, False, True, False], "it is the policy's own after step 2"
    assert [entry.plan.get("refreshed") for entry in trained["ledger"]] == [None, ["reference"], None, ["reference"]]

    # The next trainer repeats all steps; so does `relaxd replay`. The ledger decides, not the settings.
    shut_down()
    other = config_of(models["student"], {"reference": {"refresh_every": 3}}, WITH_KL)
    assert same(run_job(replace(job, config=other)), trained)
    shut_down()
    (folder / "config.json").write_text(config.model_dump_json())
    lines = [json.dumps({"step": entry.step, **entry.metrics}) + "\n" for entry in trained["ledger"]]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "ledger.jsonl").write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in trained["ledger"]))
    result = replay(folder, 4, 0)
    assert result is not None
    assert all(numbers["recorded"] == numbers["replayed"] for numbers in result["numbers"].values()), result


def test_a_checkpoint_holds_what_the_reference_has_taken_over(models: dict[str, Path], tmp_path: Path) -> None:
    """Between two refreshes its weights are neither the initial model's nor the policy's."""
    job, batch = Job(models["student"], algorithm=WITH_KL), pack(make_samples(6))

    def steps(learner: Any, first: int, last: int) -> list[Any]:
        found = []
        for step in range(first, last + 1):
            learner.accumulate([batch])
            found.append(learner.update(10.0))
            learner.end_step(("reference",) if step == 2 else ())
        return found

    learner = make_learner(job)
    steps(learner, 1, 1)
    save(learner, tmp_path / "early")
    steps(learner, 2, 3)
    save(learner, tmp_path / "late")
    expected = steps(learner, 4, 4)
    weights = learner.checksum()
    assert expected[0].metrics["kl"] > 1e-6
    for name, step in (("early", 1), ("late", 3)):
        shut_down()
        restored = make_learner(job)
        restored.restore(tmp_path / name, step, same_layout=True)
        assert steps(restored, step + 1, 4)[-1:] == expected, name
        assert restored.checksum() == weights, name


def save(learner: Any, folder: Path) -> None:
    folder.mkdir()
    snapshot = learner.snapshot(folder)
    snapshot.write()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs have the same weights, bit for bit."""
    return all(np.array_equal(one["tensors"][name], tensor) for name, tensor in other["tensors"].items())
