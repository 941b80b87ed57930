"""Groups for training: validated columns, divided into samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import Algorithm
from relaxd.board import COLUMNS, REF_LOGPROBS
from services.trainer.batch.row_packing import TrainSample

TRAIN_COLUMNS = {name: column for name, column in COLUMNS.items() if column.trained}
"""All columns that the trainer reads and keeps in step files, those of only some runs included."""


class MalformedGroup(ValueError):
    """A column of a group is missing or malformed."""


@dataclass(frozen=True)
class TrainGroup:
    """A group with validated columns."""

    group_id: str
    """Its id."""
    columns: Mapping[str, Any]
    """Those of `TRAIN_COLUMNS` that the run has."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Response tokens of each sample, [n]."""
        return self.columns["lengths"]

    @property
    def sample_tokens(self) -> list[int]:
        """Tokens of each sample with its prompt."""
        return [len(self.columns["prompt_tokens"]) + int(length) for length in self.lengths]

    @property
    def trained_tokens(self) -> int:
        """Tokens whose mask is 1."""
        return int(np.count_nonzero(self.columns["loss_mask"]))

    @property
    def trained_versions(self) -> NDArray[np.int64]:
        """Versions that wrote the tokens whose mask is 1."""
        return self.columns["versions"][self.columns["loss_mask"] != 0]

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that wrote a trained token; None if there is none."""
        versions = self.trained_versions
        return int(versions.min()) if versions.size else None

    def bounds(self) -> NDArray[np.int64]:
        """Return the begin of each sample in the per-token columns, and their end: [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def samples(
        self, indices: Sequence[int], algorithm: Algorithm, temperature: float, version: int
    ) -> list[TrainSample]:
        """Return samples, ready for packing.

        Args:
            indices: indices of the samples.
            algorithm: source of the token weights.
            temperature: sampling temperature.
            version: version of the weights that will compute the log-probs. Log-probs of tokens of this version are
                comparable with the engine's, unless the sample spans a weight update with a stale cache.
        """
        columns, bounds = self.columns, self.bounds()
        weights = algorithm.token_weights(columns["loss_mask"], self.lengths)
        chosen = []
        for index in indices:
            own = slice(int(bounds[index]), int(bounds[index + 1]))
            chosen.append(
                TrainSample.from_response(
                    columns["prompt_tokens"],
                    columns["tokens"][own],
                    loss_mask=columns["loss_mask"][own],
                    rollout_logprobs=columns["rollout_logprobs"][own],
                    advantages=columns["advantages"][own],
                    ref_logprobs=columns[REF_LOGPROBS][own] if REF_LOGPROBS in columns else None,
                    weight=weights[own],
                    logprobs_comparable=(columns["versions"][own] == version)
                    & (columns["spans_weight_update"][index] == 0),
                    temperature=temperature,
                )
            )
        return chosen


def check_group(group_id: str, columns: Mapping[str, Any]) -> TrainGroup:
    """Validate a group's columns.

    Raises:
        MalformedGroup: a column is missing, has a wrong kind or size, or is NaN or infinite at a trained token.
    """
    for name, column in TRAIN_COLUMNS.items():
        if name not in columns and not column.optional:
            raise MalformedGroup(f"column {name} is missing")
    present = {name: column for name, column in TRAIN_COLUMNS.items() if name in columns}
    if _array(columns, "prompt_tokens").size == 0:
        raise MalformedGroup(
            "prompt_tokens is empty: it must have a token, from which the first response token is predicted"
        )
    lengths = _array(columns, "lengths")
    if lengths.size == 0 or (lengths < 0).any():
        raise MalformedGroup(f"lengths is {lengths.tolist()}: it must have a length for each sample, none negative")
    samples, tokens = lengths.size, int(lengths.sum())
    for name, column in present.items():
        if column.dtype == "json":
            if column.shape == "n" and (not isinstance(columns[name], list) or len(columns[name]) != samples):
                raise MalformedGroup(f"{name} must be a list of {samples} values, one for each sample")
        elif column.shape == "n" and _array(columns, name).size != samples:
            raise MalformedGroup(f"{name} has {columns[name].size} values for {samples} samples")
        elif column.shape == "T" and _array(columns, name).size != tokens:
            raise MalformedGroup(f"{name} has {columns[name].size} values for {tokens} response tokens")
    masked = columns["loss_mask"] != 0
    for name in ("rollout_logprobs", "advantages", REF_LOGPROBS):
        if name in present and not np.isfinite(columns[name][masked]).all():
            raise MalformedGroup(f"{name} is NaN or infinite at a trained token")
    return TrainGroup(group_id, {name: columns[name] for name in present})


def _array(columns: Mapping[str, Any], name: str) -> np.ndarray:
    value, kinds = columns[name], TRAIN_COLUMNS[name].kinds
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise MalformedGroup(f"{name} is {what}: it must be an array [values] of kind {' or '.join(kinds)}")
    return value
