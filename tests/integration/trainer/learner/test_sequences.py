"""Columns and sequences from the board to the loss: nothing between them names a column or counts on S = n."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import relaxd.algorithms
from relaxd.algorithms import GRPO, Advantages, LossInputs, LossOutput, Needs, create, sample_lengths
from relaxd.board import COLUMNS, ColumnSpec, stages_for
from relaxd.config import RunConfig
from services.trainer.batch.micro_batch_division import Packer, mini_batch
from services.trainer.batch.step_plan import MicroBatchRound, read_step_file, write_step_file
from services.trainer.learner.learner import Learner
from services.trainer.loop.round_runner import RoundRunner
from services.trainer.loop.step_phases import StepBuilder
from services.trainer.loop.training_queue import TrainingQueue
from tests.integration.trainer.service_kit import Feeder, make_config, trainer_service
from tests.integration.trainer.trainer_worlds import LAYOUTS, Job, make_model, run_job, run_named
from tests.kit.boards import kept_samples
from tests.kit.megatron_world import shut_down
from tests.kit.processes import run_python

# --- one more column ----------------------------------------------------------------------------------------------


class Curious(GRPO):
    """GRPO that wants one more column, and keeps what its loss gets."""

    seen: list[LossInputs] = []  # noqa: RUF012

    @property
    def needs(self) -> Needs:
        """One more than GRPO."""
        return Needs(loss=(*super().needs.loss, "surprise"), advantages=("surprise",))

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Keep the inputs."""
        self.seen.append(inputs)
        return super().loss(inputs)


def test_one_more_column_reaches_the_loss_and_the_step_file_by_itself(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    monkeypatch.setitem(COLUMNS, "surprise", ColumnSpec("surprise", "rollout", "float32", "T", "", optional=True))
    config = make_config(tiny_qwen3, trainer={"micro_batch_tokens": 24})
    assert not any("surprise" in (*stage.needs, *stage.writes) for stage in stages_for(config))
    monkeypatch.setitem(relaxd.algorithms.ALGORITHMS, "grpo", Curious)
    monkeypatch.setattr(Curious, "seen", [])
    stages = {stage.name: stage for stage in stages_for(config)}
    assert {name for name, stage in stages.items() if "surprise" in stage.needs} == {"advantage", "train"}
    assert "surprise" in stages["rollout"].writes

    feeder = Feeder(redis_url, config)
    feeder.board.new_trainer_term()
    feeder.feed(1, 0, surprise=np.arange(12, dtype=np.float32))
    feeder.feed(1, 0, surprise=np.arange(12, 24, dtype=np.float32))
    open_step = taken_step(feeder, config)
    learner = Learner(tiny_qwen3, config.trainer, config.algorithm, steps=3, seed=5)
    runner = RoundRunner(learner, config)
    for entry in open_step.rounds:
        runner.run(entry, open_step.groups)
    expected = [
        [
            (position, value)
            for position, (group_id, index) in enumerate(
                (piece.group_id, index) for piece in micro_batch for index in piece.sequences
            )
            for value in range((int(group_id[1:]) - 1) * 12 + 6 * index, (int(group_id[1:]) - 1) * 12 + 6 * index + 6)
        ]
        for micro_batch in micro_batches(open_step.rounds)
    ]
    found = [
        list(zip(inputs.sequence.tolist(), inputs.columns["surprise"].tolist(), strict=True)) for inputs in Curious.seen
    ]
    assert len(found) > 1
    assert found == expected

    open_step.mini_batches = (mini_batch(open_step.groups.values(), open_step.rounds, create(config.algorithm)),)
    plan = open_step.plan(config, 1)
    write_step_file(tmp_path / "step", plan, {name: group.columns for name, group in open_step.groups.items()})
    stats = learner.finish(plan.updates[0].normalizer)
    shut_down()
    again = RoundRunner(Learner(tiny_qwen3, config.trainer, config.algorithm, steps=3, seed=5), config)
    assert again.replay(read_step_file(tmp_path / "step"), None) == [stats]
    feeder.board.close()


def test_columns_that_nobody_writes_or_that_have_no_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(GRPO):
        needs = Needs(loss=("reward",))  # type: ignore[assignment]

    monkeypatch.setitem(relaxd.algorithms.ALGORITHMS, "grpo", Greedy)
    with pytest.raises(ValueError, match="its loss needs 'reward', which isn't a column of tokens that the run has"):
        stages_for(make_config(Path("model")))
    monkeypatch.setattr(Greedy, "needs", Needs(loss=("advantages", "values")))
    with pytest.raises(ValueError, match=r"algorithm\.name = 'grpo': its loss needs 'values'"):
        stages_for(make_config(Path("model")))
    monkeypatch.setattr(Greedy, "needs", Needs(loss=(), advantages=("advantages",)))
    with pytest.raises(ValueError, match="its advantages need 'advantages', which isn't a column that is there before"):
        stages_for(make_config(Path("model")))


def taken_step(feeder: Feeder, config: RunConfig) -> StepBuilder:
    """The first step, with all groups that are there."""
    intake = TrainingQueue(feeder.board, "trainer", config)
    open_step = StepBuilder(1, Packer(config.trainer.micro_batch_tokens, 1), {})
    while intake.take(1, 0.05):
        pass
    open_step.add(intake.select(1, []).chosen)
    assert len(open_step.members) == config.trainer.groups_per_step
    rest = open_step.packer.rest()
    assert rest is not None
    open_step.rounds.append(rest)
    intake.close()
    return open_step


def micro_batches(rounds: list[MicroBatchRound]) -> Iterator[Any]:
    return (micro_batch for entry in rounds for share in entry.micro_batches for micro_batch in share)


# --- S = 2n -------------------------------------------------------------------------------------------------------


def conversations(group_id: str, samples: int, version: int) -> dict[str, Any]:
    """What rollout writes of conversations that were compacted once: two sequences a sample.

    The first continues the prompt, with an observation in between. The second begins with a summary as its prompt.
    """
    rng = np.random.default_rng(int(group_id[1:]))
    masks: list[list[int]] = []
    for sample in range(samples):
        masks += [[1] * (2 + sample) + [0, 0] + [1, 1], [0] * 3 + [1] * (4 - sample)]
    mask = np.concatenate(masks).astype(np.uint8)
    logprobs = rng.normal(-5.5, 0.3, len(mask)).astype(np.float32)
    logprobs[mask == 0] = np.nan  # nobody asked an engine for these
    return {
        "tokens": rng.integers(3, 250, len(mask)).astype(np.int32),
        "sample_of_sequence": np.repeat(np.arange(samples), 2).astype(np.int32),
        "lengths": np.array([len(one) for one in masks], np.int32),
        "shares_prompt": np.array([1, 0] * samples, np.uint8),
        "loss_mask": mask,
        "rollout_logprobs": logprobs,
        "versions": np.where(mask == 1, version, -1),
        "finish": ["stop"] * (2 * samples),
        "text": [f"{part} of {sample}" for sample in range(samples) for part in ("first", "last")],
        "spans_weight_update": np.zeros(2 * samples, np.uint8),
    }


def feed_conversations(feeder: Feeder, config: RunConfig, count: int) -> list[dict[str, Any]]:
    """Bring groups of conversations up to the train stage. Returns their columns."""
    samples, algorithm = config.rollout.samples_per_prompt, create(config.algorithm)
    feeder.publish(count)
    groups = []
    for delivery in feeder.begin(count, 0):
        columns = conversations(delivery.group_id, samples, 0)
        assert feeder.board.commit([(delivery, columns)]) == [True]
        assert feeder.board.open_versions()[delivery.group_id] == 0, "tokens of others have no version"
        (prompt,) = feeder.board.load([delivery], ["prompt_tokens"])
        assert prompt is not None
        reward = {"reward": np.arange(samples, dtype=np.float64) ** 2, "reward_parts": {}}
        found = algorithm.advantages(
            reward["reward"], sample_lengths(columns["lengths"], columns["sample_of_sequence"], samples)
        )
        assert isinstance(found, Advantages)
        for stage, written in (("reward", reward), ("advantage", {"advantages": found.values})):
            (taken,) = feeder.board.take(stage, "tester", count=1, block_seconds=1.0)
            assert feeder.board.commit([(taken, written)]) == [True]
            columns |= written
        groups.append(columns | prompt)
    return groups


def exact_loss(folder: Path, groups: list[dict[str, Any]], config: RunConfig) -> float:
    """The clipped objective in float64: each sample's mean over the tokens of all its sequences, then of samples."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    low, high = 1 - config.algorithm.clip_low, 1 + config.algorithm.clip_high
    per_sample: dict[tuple[int, int], list[float]] = {}
    for number, columns in enumerate(groups):
        ends = np.cumsum(columns["lengths"])
        for sequence, end in enumerate(ends):
            own = slice(end - columns["lengths"][sequence], end)
            shared = columns["prompt_tokens"] if columns["shares_prompt"][sequence] else columns["tokens"][:0]
            tokens = torch.from_numpy(np.concatenate([shared, columns["tokens"][own]]).astype(np.int64))
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
            logprobs = np.concatenate([[np.nan], logprobs.numpy()])[len(shared) :]
            rewards = columns["reward"]
            sample = int(columns["sample_of_sequence"][sequence])
            advantage = (rewards[sample] - rewards.mean()) / (rewards.std(ddof=1) + config.algorithm.std_epsilon)
            terms = per_sample.setdefault((number, sample), [])
            for token in np.flatnonzero(columns["loss_mask"][own]):
                ratio = np.exp(logprobs[token] - float(columns["rollout_logprobs"][own][token]))
                terms.append(-min(ratio * advantage, np.clip(ratio, low, high) * advantage))
    return float(np.mean([np.mean(terms) for terms in per_sample.values()]))


@pytest.mark.slow
def test_two_sequences_a_sample_are_trained_committed_and_replayed(
    tiny_qwen3: Path, redis_url: str, tmp_path: Path
) -> None:
    config = make_config(
        tiny_qwen3,
        run={"steps": 1},
        trainer={"micro_batch_tokens": 24},
        algorithm={"loss_aggregation": "sample_mean", "old_logprobs": "rollout", "clip_low": 0.5, "clip_high": 0.5},
    )
    with trainer_service(config, redis_url, tmp_path) as (coordinator, feeder, process):
        groups = feed_conversations(feeder, config, 2)
        coordinator.wait_for_version(1, 1)
        (entry,) = feeder.board.ledger()
        counts = feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.open) == (2, 0)
        (plan,) = entry.plan["mini_batches"]
        slices = [dict(micro_batch) for one in plan["rounds"] for share in one for micro_batch in share]
        found = [(group_id, index) for one in slices for group_id, indices in one.items() for index in indices]
        assert sorted(found) == [(group_id, index) for group_id in ("g1", "g2") for index in range(4)]
        assert not any({0, 1} <= set(one.get("g1", ())) for one in slices), "a sample's sequences are to be apart"
        assert (plan["samples"], plan["normalizer"]) == (4, 4.0)
        assert plan["trained_tokens"] == sum(int(columns["loss_mask"].sum()) for columns in groups)
        assert entry.metrics["samples"] == 4
        assert entry.metrics["response_length_mean"] == np.mean([len(one["tokens"]) for one in groups]) / 2
        assert entry.metrics["loss"] == pytest.approx(exact_loss(tiny_qwen3, groups, config), rel=1e-5)
        shown = kept_samples(feeder.board, 1, 100)
        assert [(one["group_id"], one["response"], one["version"]) for one in shown] == [
            (group_id, f"last of {sample}", 0) for sample in (0, 1) for group_id in ("g1", "g2")
        ]
        assert process.stop() == 0
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **entry.metrics}) + "\n")
    replayed = run_python("-m", "services.trainer.offline.replay", "--run-folder", str(tmp_path), "--step", "1")
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    numbers = json.loads(replayed.stdout)["numbers"]
    assert numbers["loss"]["recorded"] == entry.metrics["loss"]
    assert all(number["replayed"] == number["recorded"] for number in numbers.values()), numbers


# --- losses in every layout ------------------------------------------------------------------------------------


OF_SEQUENCES: dict[str, dict[str, Any]] = {
    "gspo": {"name": "gspo", "clip_low": 0.3, "clip_high": 0.3},
    "grpo with masks": {"opsm_delta": 0.3, "veto_low": 0.1, "veto_sequences": True, "dual_clip": 3.0},
}
"""Losses with sums over sequences."""
CURRENT = {"old_logprobs": "current"}
OF_TOKENS: dict[str, dict[str, Any]] = {
    "sapo, unbiased KL": {"name": "sapo", "kl_coef": 0.1, "kl_unbiased": True},
    "cispo": {"name": "cispo", "clip_low": 0.5, "clip_high": 0.5},
    "rloo, tis": {"name": "rloo", "correction": "tis", "tis_clip_low": 0.5, "tis_clip": 1.5},
    "grpo, icepop": {**CURRENT, "name": "grpo", "correction": "icepop", "icepop_high": 1.5},
    "opd": {**CURRENT, "name": "opd", "distill_coef": 0.0, "distill_loss_coef": 0.5},
}
"""Losses whose terms are of one token each, and what they have besides advantages."""


LEAVES_OUT = {
    "gspo": ("clip_fraction",),
    "grpo with masks": ("clip_fraction", "veto_fraction", "opsm_fraction"),
    "cispo": ("clip_fraction",),
    "rloo, tis": ("correction_fraction",),
    "grpo, icepop": ("correction_fraction",),
}
"""Metrics that show that a loss treats some tokens otherwise than others."""
COMPARED = (
    *("ratio", "clip_fraction", "veto_fraction", "opsm_fraction", "kl", "teacher_kl"),
    *("correction_weight", "correction_fraction"),
)


@pytest.mark.parametrize(
    "losses",
    [pytest.param(OF_SEQUENCES, id="of sequences"), pytest.param(OF_TOKENS, id="of tokens", marks=pytest.mark.night)],
)
def test_losses_are_the_same_however_ranks_and_micro_batches_are_arranged(
    losses: dict[str, dict[str, Any]], tmp_path: Path, alone: None
) -> None:
    """With context parallelism a rank has only a slice of a sequence."""
    model, teacher = make_model(tmp_path / "model", "qwen3"), make_model(tmp_path / "teacher", "llama")
    made = {
        name: Job(model, algorithm=settings, steps=2, frozen={"teacher": {"": teacher}} if name == "opd" else None)
        for name, settings in losses.items()
    }
    whole = {name: run_job(job) for name, job in made.items()}
    divided = {
        (name, way): replace(job, parallel=parallel, pieces=2)
        for name, job in made.items()
        for way, parallel in LAYOUTS.items()
    }
    for key, ranks in run_named(divided, 2, tmp_path / "world").items():
        assert ranks[0]["trajectory"] == ranks[1]["trajectory"], key
        for ours, theirs in zip(ranks[0]["trajectory"], whole[key[0]]["trajectory"], strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-5), key
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4), key
            mine, others = ({n: stats.metrics[n] for n in COMPARED if n in stats.metrics} for stats in (ours, theirs))
            assert mine == pytest.approx(others, rel=1e-4, abs=1e-6), key
    for name in LEAVES_OUT.keys() & whole.keys():
        first = whole[name]["trajectory"][0].metrics
        assert all(0 < first[metric] < 1 for metric in LEAVES_OUT[name]), name
