"""Metrics and sample records from a step's groups, and its times in each stage."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd import telemetry
from relaxd.algorithms.advantage_terms import Whitening
from relaxd.board import (
    ADVANTAGES,
    CRITIC_STATE,
    ENVIRONMENT_INFO,
    ENVIRONMENT_REWARD,
    ENVIRONMENT_SECONDS,
    LOSS_MASK,
    OLD_LOGPROBS,
    OUTSIDE_SECONDS,
    PROMPT_MEDIA,
    RESPONSE_MESSAGES,
    RETURNS,
    SEQUENCE_MEDIA,
    TOOL_CALLS,
    TOOL_ERRORS,
    TRAIN,
    TURNS,
    VALUES,
    VERSIONS,
    WEIGHT_RECEIPTS,
    StageTime,
)
from relaxd.board.types import MICROSECONDS
from relaxd.media.prompt_media import MediaRecord, contents_of_group, hashes_of
from relaxd.media.shown import SHOWN_MEDIA, shown_media, shown_message
from relaxd.models.flops import peak_flops, training_flops
from relaxd.models.shape import ModelShape
from relaxd.rewards.logged import part_metrics
from relaxd.weights.receipts import Receipt
from services.trainer.batch.groups import TrainGroup, bounds_of
from services.trainer.loop.sample_statistics import sample_statistics
from services.trainer.loop.step_phases import StepBuilder


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
    """Return the values by name, of all samples that have them, from a column {name: [n values, null without it]}."""
    parts: dict[str, list[float]] = {}
    for group in groups:
        for name, values in (group.columns[column] or {}).items():
            parts.setdefault(name, []).extend(value for value in values if value is not None)
    return parts


def _conversation_metrics(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """Return metrics of conversations with an environment."""
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
    """Return the number of tokens between the model's own, in all sequences."""
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
        epochs: how often the step trains on them.
        seconds: in which it did: train_seconds.
        ranks: of the trainer.
        shape: the model; None without one.
        device_name: name of the GPUs; "" on CPU.
    """
    if seconds <= 0:
        return {}
    prompts = np.array([len(group.columns["prompt_tokens"]) for group in groups], np.float64)
    own = np.concatenate([group.lengths for group in groups]).astype(np.float64)
    shares = np.concatenate([group.columns["shares_prompt"] != 0 for group in groups])
    before = np.repeat(prompts, [len(group.lengths) for group in groups]) * shares
    # A shared prompt is stored once for its group's sequences, as packing does where they are in one micro-batch.
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
    # In float64: the variance of returns that are all but equal would be noise.
    variance = float(returns.var(dtype=np.float64))
    unexplained = float((returns - values).var(dtype=np.float64))
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    return metrics | ({"explained_variance": 1.0 - unexplained / variance} if variance > 0 else {})


def _critic_metrics(groups: Sequence[TrainGroup], step: int) -> dict[str, float]:
    """Return the age of a critic service's values, and the metrics of the newest critic among them."""
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
    """Export histograms of reward, response length and staleness, by sample."""
    if not telemetry.enabled():
        return
    attributes = {"relaxd.run_id": run_id}
    for group in groups:
        lengths = group.sample_lengths
        bounds = bounds_of(lengths)
        for index, length in enumerate(lengths):
            telemetry.record("reward", float(group.columns["reward"][index]), attributes)
            telemetry.record("response_length", int(length), attributes)
            versions = _trained_versions(group, slice(bounds[index], bounds[index + 1]))
            if versions.size:
                telemetry.record("staleness", step - 1 - int(versions.min()), attributes)


def shown_samples(
    groups: Sequence[TrainGroup],
    step: int,
    limit: int,
    whitening: Whitening | None = None,
    traces: Mapping[str, dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Choose samples to show, every group's first sample first, with the fields of TrainedSample in coordinator.proto.

    A sample of several sequences is shown with the text of the last one.

    Args:
        groups: the step's groups.
        step: the step.
        limit: largest number of samples.
        whitening: what their advantages are normalised with, if they are.
        traces: fields of a group's samples with the ids of traces, by group.
    """
    places = [
        (index, place) for place, group in enumerate(groups) for index in range(group.samples)
    ]  # every group's sample 0, then every group's sample 1 ...
    chosen = sorted(places)[:limit]
    found: dict[int, list[int]] = {}
    for index, place in chosen:
        found.setdefault(place, []).append(index)
    bounds = {place: bounds_of(groups[place].sample_lengths) for place in found}
    media = {place: _media_of_samples(groups[place], own, previews=True) for place, own in found.items()}
    return [
        _shown(groups[place], index, bounds[place], step, whitening)
        | media[place][index]
        | {"tokens": _shown_tokens(groups[place], index, bounds[place], whitening)}
        | (traces or {}).get(groups[place].group_id, {})
        for index, place in chosen
    ]


def all_samples(groups: Sequence[TrainGroup], step: int, whitening: Whitening | None = None) -> list[dict[str, Any]]:
    """Return all samples as `shown_samples` does, group by group, with their sources.

    They are without tokens, and media without previews.
    """
    found = []
    for group in groups:
        prompt = group.columns["prompt"] or {}
        bounds, media = bounds_of(group.sample_lengths), _media_of_samples(group, range(group.samples))
        for index in range(group.samples):
            metadata = prompt.get("metadata") or {}
            source = {"source": metadata["data_source"]} if "data_source" in metadata else {}
            found.append(_shown(group, index, bounds, step, whitening) | media[index] | source)
    return found


def _shown(
    group: TrainGroup, index: int, bounds: NDArray[np.int64], step: int, whitening: Whitening | None
) -> dict[str, Any]:
    """Return a sample's record; `bounds`: the samples' offsets in the columns [T]."""
    columns = group.columns
    own = slice(int(bounds[index]), int(bounds[index + 1]))
    advantages = columns["advantages"][own]
    if whitening is not None:
        advantages = whitening.apply(advantages, columns["loss_mask"][own])
    length = own.stop - own.start
    versions = _trained_versions(group, own)
    last = int(np.searchsorted(columns["sample_of_sequence"], index, side="right")) - 1
    prompt, found = columns["prompt"] or {}, columns.get(WEIGHT_RECEIPTS)
    return {
        "group_id": group.group_id,
        "sample": index,
        "step": step,
        "prompt": str(prompt.get("text", "")),
        "answer": str(prompt.get("answer", "")),
        "response": str(columns["text"][last]),
        "reward": float(columns["reward"][index]),
        "reward_parts": {
            name: values[index] for name, values in (columns["reward_parts"] or {}).items() if values[index] is not None
        },
        "advantage": float(advantages.mean()) if length else 0.0,
        "version": int(versions.min()) if versions.size else 0,
        "length": length,
        "finish_reason": str(columns["finish"][last]),
        **({"receipts": [Receipt(*one)._asdict() for one in found[index]]} if found else {}),
        **(_shown_conversation(columns, index) if TURNS in columns else {}),
    }


SHOWN_TOKENS = 1000
"""Maximum number of tokens of a sample that are shown."""
TOKEN_COLUMNS = {
    "ids": "tokens",
    "trained": LOSS_MASK,
    "engine_logprobs": "rollout_logprobs",
    "trainer_logprobs": OLD_LOGPROBS,
    "advantages": ADVANTAGES,
    "versions": VERSIONS,
}
"""Fields of SampleTokens in coordinator.proto, with the columns that they contain."""
DIGITS = 4
"""Significant digits of their numbers."""


def _shown_tokens(
    group: TrainGroup, index: int, bounds: NDArray[np.int64], whitening: Whitening | None
) -> dict[str, list[Any]]:
    """Return the first tokens of a sample. A list of equal numbers, except ids, is reduced to one."""
    own = slice(int(bounds[index]), min(int(bounds[index + 1]), int(bounds[index]) + SHOWN_TOKENS))
    found = {}
    for name, column in TOKEN_COLUMNS.items():
        if column not in group.columns:
            continue
        values = group.columns[column][own]
        if column == LOSS_MASK:
            values = values != 0
        elif column == ADVANTAGES and whitening is not None:
            values = whitening.apply(values, group.columns[LOSS_MASK][own])
        listed = [float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for value in values.tolist()]
        found[name] = listed[:1] if name != "ids" and len(set(listed)) == 1 else listed
    return found


def _media_of_samples(
    group: TrainGroup, indices: Collection[int], *, previews: bool = False
) -> dict[int, dict[str, Any]]:
    """Return the media to show for a group's samples: the first ones of its prompt and of each conversation."""
    found: dict[int, list[MediaRecord]] = {index: list(group.columns.get(PROMPT_MEDIA) or ()) for index in indices}
    # A run without conversations lacks the column, one with several players has several sequences for a sample.
    of_sequences = zip(group.columns["sample_of_sequence"], group.columns.get(SEQUENCE_MEDIA) or (), strict=False)
    for sample, records in of_sequences:
        if sample in found:
            known = hashes_of(found[sample])
            found[sample] += [record for record in records if record["sha256"] not in known]
    first = {index: own[:SHOWN_MEDIA] for index, own in found.items()}
    wanted = {record["sha256"]: record for own in first.values() for record in own}
    if not wanted:
        return {index: {} for index in indices}
    shown = shown_media(contents_of_group(group.columns), wanted.values(), previews=previews)
    return {index: {"media": [shown[name] for name in hashes_of(own)]} if own else {} for index, own in first.items()}


def _shown_conversation(columns: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the columns that samples show of a conversation."""
    return {
        "conversation": [shown_message(message) for message in columns[RESPONSE_MESSAGES][index]],
        "turns": int(columns[TURNS][index]),
        "environment_reward": float(columns[ENVIRONMENT_REWARD][index]),
        "environment_seconds": float(columns[ENVIRONMENT_SECONDS][index]),
    }


def _trained_versions(group: TrainGroup, own: slice) -> NDArray[np.int64]:
    """Return the versions of the tokens within `own` with mask 1."""
    return group.columns["versions"][own][group.columns["loss_mask"][own] != 0]


WORK_NAMES = {"rollout": "generate", "reward": "score", TRAIN: "in_step"}
"""Names of a stage's work, in metrics, that differ from the stage's."""


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
    """Return the trainer's times in a step, in seconds.

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
