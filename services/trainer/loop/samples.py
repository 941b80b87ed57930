"""Records of a step's samples: a few for display, and files with all samples (telemetry.all_samples), which are written
beside training."""

import gzip
import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms.advantage_terms import Whitening
from relaxd.board import (
    ADVANTAGES,
    ENVIRONMENT_REWARD,
    ENVIRONMENT_SECONDS,
    LOSS_MASK,
    OLD_LOGPROBS,
    PROMPT_MEDIA,
    RESPONSE_MESSAGES,
    SEQUENCE_MEDIA,
    TURNS,
    VERSIONS,
    WEIGHT_RECEIPTS,
)
from relaxd.media.prompt_media import MediaRecord, contents_of_group, hashes_of
from relaxd.media.shown import SHOWN_MEDIA, shown_media, shown_message
from relaxd.run_folder import all_samples_file
from relaxd.waiting import waiting
from relaxd.weights.receipts import Receipt
from services.trainer.batch.groups import TrainGroup

logger = logging.getLogger(__name__)

LEVEL = 1
"""Compression level of zlib. Compression releases the interpreter lock, so training continues."""
PATIENCE_SECONDS = 10.0
"""Maximum seconds for which a step waits for the file of the previous step."""
LINES_TOGETHER = 64
"""Number of samples, one per line, that are compressed in one call."""


class SampleFiles:
    """Writes each step's samples to a file, in a thread, and removes old files.

    A step that is trained again replaces its file. If the disk refuses a file or is slow, the step's samples are lost
    with a warning, and training continues. A trainer that is killed right after a commit may leave that step without a
    file.
    """

    def __init__(self, folder: Path, kept_steps: int) -> None:
        """`folder`: the run folder; `kept_steps`: number of newest steps whose files are kept, 0 for all."""
        self._folder = folder
        self._kept_steps = kept_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None
        self._refused = False

    def write(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Start writing a step's samples. Discard them if the previous step's file isn't written in time."""
        if self.await_written():
            self._writing = self._thread.submit(self._write, step, samples)
        else:
            logger.warning(
                "the samples of step %d are not kept: those of an earlier step are still being written", step
            )

    def await_written(self, seconds: float | None = None) -> bool:
        """Wait up to `seconds` (default: PATIENCE_SECONDS) until the last file is written. Return True if it is."""
        if self._writing is not None:
            with waiting("the samples of the step before, to be written", disk=True):
                wait([self._writing], PATIENCE_SECONDS if seconds is None else seconds)
            if not self._writing.done():
                return False
            self._writing.result(0)  # raises unexpected errors
            self._writing = None
        return True

    def _write(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        path = all_samples_file(self._folder, step)
        partial = path.with_name(f"{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.GzipFile(partial, "wb", LEVEL, mtime=0) as file:
                for begin in range(0, len(samples), LINES_TOGETHER):
                    lines = (json.dumps(one, ensure_ascii=False) for one in samples[begin : begin + LINES_TOGETHER])
                    file.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
            os.replace(partial, path)
            if self._kept_steps and step > self._kept_steps:
                all_samples_file(self._folder, step - self._kept_steps).unlink(missing_ok=True)
        except OSError as error:
            if not self._refused:
                logger.warning("the samples of step %d are not kept: %s", step, error)
            self._refused = True
            return
        self._refused = False


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
        limit: maximum number of samples.
        whitening: normalisation of the advantages, if any.
        traces: fields with the trace ids of each group's samples, by group id.
    """
    places = [
        (index, place) for place, group in enumerate(groups) for index in range(group.samples)
    ]  # every group's sample 0, then every group's sample 1 ...
    chosen = sorted(places)[:limit]
    found: dict[int, list[int]] = {}
    for index, place in chosen:
        found.setdefault(place, []).append(index)
    slices = {place: groups[place].sample_slices for place in found}
    media = {place: _media_of_samples(groups[place], own, previews=True) for place, own in found.items()}
    return [
        _shown(groups[place], index, slices[place][index], step, whitening)
        | media[place][index]
        | {"tokens": _shown_tokens(groups[place], slices[place][index], whitening)}
        | (traces or {}).get(groups[place].group_id, {})
        for index, place in chosen
    ]


def all_samples(groups: Sequence[TrainGroup], step: int, whitening: Whitening | None = None) -> list[dict[str, Any]]:
    """Return all samples as `shown_samples` does, group by group, with their sources.

    The records have no tokens, and their media no previews.
    """
    found = []
    for group in groups:
        prompt = group.columns["prompt"] or {}
        metadata = prompt.get("metadata") or {}
        source = {"source": metadata["data_source"]} if "data_source" in metadata else {}
        media = _media_of_samples(group, range(group.samples))
        for index, own in enumerate(group.sample_slices):
            found.append(_shown(group, index, own, step, whitening) | media[index] | source)
    return found


def _shown(group: TrainGroup, index: int, own: slice, step: int, whitening: Whitening | None) -> dict[str, Any]:
    """Return a sample's record for display; `own` is the sample's slice of the group's tokens."""
    columns = group.columns
    advantages = columns["advantages"][own]
    if whitening is not None:
        advantages = whitening.apply(advantages, columns["loss_mask"][own])
    length = own.stop - own.start
    versions = trained_versions(group, own)
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
"""Maximum number of tokens displayed of a sample."""
TOKEN_COLUMNS = {
    "ids": "tokens",
    "trained": LOSS_MASK,
    "engine_logprobs": "rollout_logprobs",
    "trainer_logprobs": OLD_LOGPROBS,
    "advantages": ADVANTAGES,
    "versions": VERSIONS,
}
"""Column that each field of SampleTokens (coordinator.proto) shows."""
DIGITS = 4
"""Number of significant digits of the floats in SampleTokens."""


def _shown_tokens(group: TrainGroup, own: slice, whitening: Whitening | None) -> dict[str, list[Any]]:
    """Return a sample's first tokens, as fields of SampleTokens. A field of equal numbers holds one, except ids."""
    own = slice(own.start, min(own.stop, own.start + SHOWN_TOKENS))
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
    """Return media records by sample index: the first few of the prompt and of the sample's conversation."""
    found: dict[int, list[MediaRecord]] = {index: list(group.columns.get(PROMPT_MEDIA) or ()) for index in indices}
    # A run without conversations lacks the column. With several players, a sample has several sequences.
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
    """Return a sample's messages, number of turns, and environment reward and seconds, as record fields."""
    return {
        "conversation": [shown_message(message) for message in columns[RESPONSE_MESSAGES][index]],
        "turns": int(columns[TURNS][index]),
        "environment_reward": float(columns[ENVIRONMENT_REWARD][index]),
        "environment_seconds": float(columns[ENVIRONMENT_SECONDS][index]),
    }


def trained_versions(group: TrainGroup, own: slice) -> NDArray[np.int64]:
    """Return the weight versions that wrote the trained tokens (mask 1) in the slice `own` of a group."""
    return group.columns["versions"][own][group.columns["loss_mask"][own] != 0]
