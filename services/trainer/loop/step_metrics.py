"""Metrics of a step: statistics of its samples (rewards, lengths and repetition, also by outcome, finish reason and
source), speed, and its times in each stage.

Everything is numpy over one value per sample, except the compression that finds repetition.
"""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd import telemetry
from relaxd.board import (
    CRITIC_STATE,
    ENVIRONMENT_INFO,
    ENVIRONMENT_REWARD,
    ENVIRONMENT_SECONDS,
    LOSS_MASK,
    OUTSIDE_SECONDS,
    RETURNS,
    TOOL_CALLS,
    TOOL_ERRORS,
    TRAIN,
    TURNS,
    VALUES,
    StageTime,
)
from relaxd.board.group_contents import RIGHT_FROM
from relaxd.board.types import MICROSECONDS
from relaxd.config import TrainerConfig
from relaxd.models.flops import peak_flops, training_flops
from relaxd.models.shape import ModelShape
from relaxd.reasons import TRUNCATED
from relaxd.rewards.logged import part_metrics
from services.trainer.batch.groups import TrainGroup, bounds_of
from services.trainer.batch.step_plan import StepPlan, bubble_share
from services.trainer.learner.learner import Learner
from services.trainer.learner.update import UpdateStats, step_metrics
from services.trainer.loop.samples import trained_versions
from services.trainer.loop.step_phases import StepBuilder

STATISTICS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "mean": np.mean,
    "median": np.median,
    "min": np.min,
    "max": np.max,
    "std": np.std,
}
"""Statistics of reward and response_length; the key ends the metric's name."""
REPEATED_CHARACTERS = 10_000
"""Number of characters at an answer's end that are compressed to find repetition."""
REPEATED_RATIO = 10.0
"""Compression ratio of an answer's end above which the answer repeats itself."""
MAX_COMPRESSED = 512
"""Maximum number of a step's answers to compress, evenly spread: each takes 0.2 ms."""
MAX_SOURCES = 32
"""Maximum number of sources with statistics; the samples of all further sources are counted as `other`."""
NO_NAME = re.compile(r"[^A-Za-z0-9_.\-]+")
"""Matches the characters of a source that a metric's name can't have."""
MAX_NAME = 64
"""Maximum length of a source in a metric's name, in characters."""


@dataclass(frozen=True)
class StepSamples:
    """Rewards, lengths, finish reasons, texts and sources of a step's n samples, each an array [n]."""

    rewards: NDArray[np.float64]
    lengths: NDArray[np.int32]
    """Response tokens per sample."""
    finishes: NDArray[np.str_]
    """Finish reason of each sample's last sequence."""
    texts: NDArray[np.object_]
    """Text of each sample's last sequence."""
    sources: NDArray[np.str_]
    """Each prompt's `metadata.data_source`, made fit for metric names; "" if absent."""

    @classmethod
    def of(cls, groups: Sequence[TrainGroup]) -> "StepSamples":
        """Collect the samples of `groups`, which must not be empty."""
        finishes: list[str] = []
        texts: list[str] = []
        sources: list[str] = []
        for group in groups:
            columns = group.columns
            last = np.searchsorted(columns["sample_of_sequence"], np.arange(group.samples), side="right") - 1
            finishes += [str(columns["finish"][place]) for place in last]
            texts += [str(columns["text"][place]) for place in last]
            sources += [_source(columns["prompt"])] * group.samples
        return cls(
            rewards=np.concatenate([group.columns["reward"] for group in groups]),
            lengths=np.concatenate([group.sample_lengths for group in groups]),
            finishes=np.array(finishes),
            texts=np.array(texts, dtype=np.object_),
            sources=np.array(sources),
        )

    def part(self, chosen: NDArray[np.bool_]) -> "StepSamples":
        """Return the samples where `chosen`, bool [n], is True."""
        return StepSamples(**{name: values[chosen] for name, values in vars(self).items()})


MEASURES: dict[str, Callable[[StepSamples], Any]] = {
    "reward_mean": lambda samples: samples.rewards.mean(),
    "response_length_mean": lambda samples: samples.lengths.mean(),
    "right_share": lambda samples: (samples.rewards >= RIGHT_FROM).mean(),
    "truncated_share": lambda samples: np.isin(samples.finishes, [*TRUNCATED]).mean(),
}
"""Measures of a subset of a step's samples; the key ends the metric's name."""
PARTS: dict[str, tuple[Callable[[StepSamples], dict[str, NDArray[np.bool_]]], tuple[str, ...]]] = {
    "outcome": (
        lambda samples: {"right": samples.rewards >= RIGHT_FROM, "wrong": samples.rewards < RIGHT_FROM},
        ("response_length_mean", "truncated_share"),
    ),
    "finish": (
        lambda samples: {reason: samples.finishes == reason for reason in np.unique(samples.finishes)},
        ("reward_mean", "response_length_mean"),
    ),
    "source": (lambda samples: _by_source(samples.sources), tuple(MEASURES)),
}
"""For each division of a step's samples: a function that returns a mask per part, and the measures of each part. The
metrics are named `<division>/<part>/<measure>`."""


def sample_statistics(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """Return statistics of the samples of `groups`, at least one, by metric name (docs/metrics.md)."""
    samples = StepSamples.of(groups)
    found: dict[str, Any] = {}
    for name, values in (("reward", samples.rewards), ("response_length", samples.lengths)):
        found |= {f"{name}_{statistic}": compute(values) for statistic, compute in STATISTICS.items()}
    found |= {name: MEASURES[name](samples) for name in ("right_share", "truncated_share")}
    compressed = np.unique(np.linspace(0, len(samples.texts) - 1, MAX_COMPRESSED).astype(int))
    found["repetition_share"] = np.mean([repeats(text) for text in samples.texts[compressed]])
    for division, (divide, measures) in PARTS.items():
        for part, chosen in divide(samples).items():
            found[f"{division}/{part}/share"] = chosen.mean()
            if chosen.any():
                some = samples.part(chosen)
                found |= {f"{division}/{part}/{name}": MEASURES[name](some) for name in measures}
    return {name: float(value) for name, value in found.items()}


def repeats(text: str) -> bool:
    """Return True if a text's end repeats itself: zlib shrinks its last 10,000 characters more than tenfold."""
    end = text[-REPEATED_CHARACTERS:].encode(errors="replace")
    return len(end) > REPEATED_RATIO * len(zlib.compress(end, 1))


def _source(prompt: Any) -> str:
    metadata = prompt.get("metadata") if isinstance(prompt, Mapping) else None
    source = metadata.get("data_source") if isinstance(metadata, Mapping) else None
    return "" if source is None else NO_NAME.sub("_", str(source))[:MAX_NAME]


def _by_source(sources: NDArray[np.str_]) -> dict[str, NDArray[np.bool_]]:
    """Return masks of the samples, bool [n], by source. "other" is the mask of all but the most frequent sources."""
    counts = Counter(source for source in sources.tolist() if source)
    parts = {source: sources == source for source, _ in counts.most_common(MAX_SOURCES)}
    if len(counts) > MAX_SOURCES:
        parts["other"] = (sources != "") & ~np.isin(sources, list(parts))
    return parts


def metrics_of_step(
    plan: StepPlan, groups: Sequence[TrainGroup], updates: Sequence[UpdateStats], learner: Learner
) -> dict[str, float]:
    """Return the metrics of a trained step's groups, updates and advantages."""
    metrics = group_metrics(groups, plan.step) | step_metrics(updates, plan.epochs)
    if plan.whitening is not None:
        metrics |= {"advantage_mean": plan.whitening.mean, "advantage_std": plan.whitening.deviation}
    return metrics | {"optimizer_steps": float(learner.optimizer_steps)}


def bubble(plan: StepPlan, trainer: TrainerConfig) -> dict[str, float]:
    """Return the idle share of pipeline stages in a step, as a metric; {} without pipeline parallelism."""
    rounds = [entry for mini_batch in plan.mini_batches for entry in mini_batch.rounds]
    stages, chunks = trainer.pipeline_parallel, trainer.pipeline_chunks
    return {"pipeline_bubble_share": bubble_share(rounds, stages, chunks)} if stages > 1 else {}


def group_metrics(groups: Sequence[TrainGroup], step: int) -> dict[str, float]:
    """Return the metrics of a step's groups: rewards, lengths, staleness, counts.

    Args:
        groups: the step's groups, at least one.
        step: the step; the staleness of a token is (step - 1) - its version.
    """
    staleness = step - 1 - np.concatenate([group.trained_versions for group in groups])
    metrics = {
        **sample_statistics(groups),
        "staleness_mean": float(staleness.mean()) if staleness.size else 0.0,
        "staleness_max": float(staleness.max()) if staleness.size else 0.0,
        "tokens": float(sum(sum(group.sequence_tokens) for group in groups)),
        "samples": float(sum(group.samples for group in groups)),
        "groups": float(len(groups)),
    }
    if all(RETURNS in group.columns for group in groups):
        metrics |= _value_metrics(groups)
    if all(CRITIC_STATE in group.columns for group in groups):
        metrics |= _critic_metrics(groups, step)
    if all(TURNS in group.columns for group in groups):
        metrics |= _conversation_metrics(groups)
    # A part that is named like a statistic, such as "max", is not shown.
    return part_metrics(_parts(groups, "reward_parts"), "reward_") | metrics


def _parts(groups: Sequence[TrainGroup], column: str) -> dict[str, list[float]]:
    """Collect the samples' values by name, from a column of {name: [n values]} in each group. Nulls are left out."""
    parts: dict[str, list[float]] = {}
    for group in groups:
        for name, values in (group.columns[column] or {}).items():
            parts.setdefault(name, []).extend(value for value in values if value is not None)
    return parts


def _conversation_metrics(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """Return the metrics of conversations with an environment: turns, tools, times, rewards, tokens."""
    turns, seconds, outside, rewards, calls, errors = (
        np.concatenate([group.columns[name] for group in groups])
        for name in (TURNS, ENVIRONMENT_SECONDS, OUTSIDE_SECONDS, ENVIRONMENT_REWARD, TOOL_CALLS, TOOL_ERRORS)
    )
    metrics = {
        "turns_mean": float(turns.mean()),
        "turns_max": float(turns.max()),
        "sequences_mean": sum(len(group.lengths) for group in groups) / turns.size,
        "tool_calls_mean": float(calls.mean()),
        "tool_errors_mean": float(errors.mean()),
        "environment_seconds_mean": float(seconds.mean()),
        "environment_seconds_max": float(seconds.max()),
        "outside_generation_seconds_mean": float(outside.mean()),
        "outside_generation_seconds_max": float(outside.max()),
        "environment_reward_mean": float(rewards.mean()),
        "model_tokens_mean": sum(np.count_nonzero(group.columns[LOSS_MASK]) for group in groups) / turns.size,
        "observation_tokens_mean": sum(map(_observation_tokens, groups)) / turns.size,
    }
    return {
        f"environment/{name}": float(np.mean(found))
        for name, found in _parts(groups, ENVIRONMENT_INFO).items()
        if found
    } | metrics


def _observation_tokens(group: TrainGroup) -> int:
    """Return the number of observation tokens of a group: those between tokens of the model in a sequence."""
    of_model = np.flatnonzero(group.columns[LOSS_MASK])
    places = np.searchsorted(of_model, bounds_of(group.lengths))
    begins, ends = places[:-1], places[1:]
    begins, ends = begins[begins < ends], ends[begins < ends]
    return int((of_model[ends - 1] - of_model[begins] + 1 - (ends - begins)).sum())


def performance(
    groups: Sequence[TrainGroup], epochs: int, seconds: float, ranks: int, shape: ModelShape | None, device_name: str
) -> dict[str, float]:
    """Return the speed of the trainer in a step, for each of its GPUs.

    Args:
        groups: the step's groups.
        epochs: number of passes over the groups.
        seconds: duration of the training (train_seconds).
        ranks: number of the trainer's ranks.
        shape: sizes of the model; None if there is none.
        device_name: name of the GPUs; "" on CPU.
    """
    if seconds <= 0:
        return {}
    prompts = np.array([len(group.columns["prompt_tokens"]) for group in groups], np.float64)
    own = np.concatenate([group.lengths for group in groups]).astype(np.float64)
    shares = np.concatenate([group.columns["shares_prompt"] != 0 for group in groups])
    before = np.repeat(prompts, [len(group.lengths) for group in groups]) * shares
    # Count a shared prompt once per group, as packing does if the group's sequences are in one micro-batch.
    tokens = own.sum() + prompts.sum()
    speed = {"train_tokens_per_second_per_gpu": epochs * float(tokens) / seconds / ranks}
    if shape is None:
        return speed
    attended = (prompts**2).sum() / 2 + (own * before + own**2 / 2).sum()
    trained = sum(group.trained_tokens for group in groups)
    flops = epochs * training_flops(shape, float(tokens), trained, float(attended)) / seconds / ranks
    peak = peak_flops(device_name)
    return {**speed, "train_tflops_per_gpu": flops / 1e12, **({"mfu": flops / peak} if peak else {})}


def _value_metrics(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """Return metrics of the critic's values at the step's beginning against the returns, over all trained tokens."""
    trained = [group.columns[LOSS_MASK] != 0 for group in groups]
    values, returns = (
        np.concatenate([group.columns[name][mask] for group, mask in zip(groups, trained, strict=True)])
        for name in (VALUES, RETURNS)
    )
    if not returns.size:
        return {}
    # In float64: in float32 the variance of nearly equal returns would be noise.
    variance = float(returns.var(dtype=np.float64))
    unexplained = float((returns - values).var(dtype=np.float64))
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    return metrics | ({"explained_variance": 1.0 - unexplained / variance} if variance > 0 else {})


def _critic_metrics(groups: Sequence[TrainGroup], step: int) -> dict[str, float]:
    """Return the staleness of the groups' values, in steps, and the metrics of the newest critic that computed any."""
    states = [group.columns[CRITIC_STATE] for group in groups]
    staleness = step - 1 - np.array([state["step"] for state in states])
    newest = max(states, key=lambda state: int(state["step"]))
    return {
        "critic_step": float(newest["step"]),
        "value_staleness_mean": float(staleness.mean()),
        "value_staleness_max": float(staleness.max()),
        **{name: float(value) for name, value in newest["metrics"].items()},
    }


def record_samples(run_id: str, groups: Sequence[TrainGroup], step: int) -> None:
    """Export each sample's reward, response length and staleness to OpenTelemetry histograms."""
    if not telemetry.enabled():
        return
    attributes = {"relaxd.run_id": run_id}
    for group in groups:
        for reward, own in zip(group.columns["reward"], group.sample_slices, strict=True):
            telemetry.record("reward", float(reward), attributes)
            telemetry.record("response_length", own.stop - own.start, attributes)
            versions = trained_versions(group, own)
            if versions.size:
                telemetry.record("staleness", step - 1 - int(versions.min()), attributes)


WORK_NAMES = {"rollout": "generate", "reward": "score", TRAIN: "in_step"}
"""Names of stages in metrics of work time, where they differ from the stage's own name."""


def group_times(open_step: StepBuilder, ended: int) -> dict[str, float]:
    """Return the times that a step's groups spent in each stage, in seconds, averaged over groups.

    Args:
        open_step: the step, with its groups.
        ended: end of the step's work, in microseconds of Unix time.

    Returns:
        For each stage queue_<stage>_seconds and its work time (generate_seconds, score_seconds and so on;
        in_step_seconds for the step itself), the longest generation as generate_seconds_max, and group_seconds from
        publish to the end of the step. group_seconds exceeds the sum of the others by commits and failed attempts.
    """
    stages: dict[str, list[StageTime]] = {}
    ages = []
    for group_id, taken in open_step.members.items():
        before = open_step.times.get(group_id)
        if before is None:  # closed meanwhile: the step can't be committed
            continue
        ages.append(max(0, ended - before.published) / MICROSECONDS)
        for name, time in before.stages.items():
            stages.setdefault(name, []).append(time)
        stages.setdefault(TRAIN, []).append(
            StageTime(taken.delivery.enqueued_at, open_step.started_at[group_id], ended)
        )
    result = {"group_seconds": _mean(ages)} if ages else {}
    for name, all_times in stages.items():
        work = WORK_NAMES.get(name, name)
        result[f"queue_{name}_seconds"] = _mean([time.queue_seconds for time in all_times])
        result[f"{work}_seconds"] = _mean([time.work_seconds for time in all_times])
        if work == "generate":
            result["generate_seconds_max"] = max(time.work_seconds for time in all_times)
    return result


def trainer_times(open_step: StepBuilder, step_seconds: float, checkpoint_seconds: float) -> dict[str, float]:
    """Return the metrics of how the trainer spent a step's time, in seconds.

    Args:
        open_step: the step.
        step_seconds: time from the end of the last step to the end of this one.
        checkpoint_seconds: time in which checkpoints blocked training.
    """
    return {
        "step_seconds": step_seconds,
        "wait_seconds": open_step.waited,
        "train_seconds": open_step.worked,
        "sync_wait_seconds": open_step.held_back,
        "step_file_seconds": open_step.wrote,
        **({"checkpoint_seconds": checkpoint_seconds} if checkpoint_seconds else {}),
        "trainer_idle_share": max(0.0, 1 - open_step.worked / step_seconds) if step_seconds else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
