"""Groups for training: validated columns, divided into sequences."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import Algorithm, sample_lengths
from relaxd.algorithms.results import token_weights_of
from relaxd.board import (
    COLUMNS,
    CRITIC_STATE,
    PROMPT_MEDIA,
    REFERENCE_WEIGHTS,
    ROUTED_EXPERTS,
    SEQUENCE_MEDIA,
    TEACHER_PROMPT_TOKENS,
)
from relaxd.config import RunConfig
from relaxd.media.media_tokens import MediaTokens
from relaxd.roles import TEACHER
from services.trainer.batch.micro_batch import TrainSequence
from services.trainer.batch.sequence_media import GroupMediaReader, check_media


class MalformedGroup(ValueError):
    """Raised if a column of a group is missing or malformed."""


@dataclass(frozen=True)
class RoutingShape:
    """Numbers of layers and experts that a group's column of routed experts must have."""

    layers: int
    """Number of layers in the column: all of the model's."""
    top_k: int
    """Number of experts that each token is routed to."""
    experts: int
    """Number of experts per layer."""


@dataclass(frozen=True)
class TrainGroup:
    """Group whose columns are validated for training."""

    group_id: str
    """Id of the group."""
    columns: Mapping[str, Any]
    """Columns that the trainer reads from the board or prepares itself; relaxd/board/schema.py describes them."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each sequence without a shared prompt, int32 [sequences]."""
        return self.columns["lengths"]

    @property
    def samples(self) -> int:
        """Number of samples in the group."""
        return len(self.columns["reward"])

    @property
    def sample_lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each sample's sequences without a shared prompt, int32 [samples]."""
        return sample_lengths(self.lengths, self.columns["sample_of_sequence"], self.samples)

    @property
    def sample_slices(self) -> list[slice]:
        """Slice of the per-token columns that holds each sample's tokens."""
        return [slice(*bounds) for bounds in pairwise(bounds_of(self.sample_lengths).tolist())]

    @property
    def sequence_tokens(self) -> list[int]:
        """Number of tokens of each sequence, including its prompt."""
        shared = len(self.columns["prompt_tokens"]) * (self.columns["shares_prompt"] != 0)
        tokens: list[int] = (self.lengths + shared).tolist()
        return tokens

    @property
    def nbytes(self) -> int:
        """Size of the group's arrays, in bytes."""
        return sum(column.nbytes for column in self.columns.values() if isinstance(column, np.ndarray))

    @property
    def routed_tokens(self) -> list[int]:
        """Number of rows of each sequence in the column of routed experts: one per token except the last."""
        return [max(tokens - 1, 0) for tokens in self.sequence_tokens]

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with loss_mask 1."""
        return int(np.count_nonzero(self.columns["loss_mask"]))

    @property
    def trained_versions(self) -> NDArray[np.int64]:
        """Weight version that wrote each token with loss_mask 1, int64 [trained_tokens]."""
        return self.columns["versions"][self.columns["loss_mask"] != 0]

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that wrote a token with loss_mask 1; None if there is no such token."""
        versions = self.trained_versions
        return int(versions.min()) if versions.size else None

    def with_columns(self, columns: Mapping[str, Any]) -> "TrainGroup":
        """Return a copy of the group with these columns added or replaced."""
        return TrainGroup(self.group_id, {**self.columns, **columns})

    def sequences(
        self,
        indices: Sequence[int],
        packed: Collection[str],
        algorithm: Algorithm,
        temperature: float,
        version: int | None,
        *,
        prompt: str = "prompt_tokens",
        media: GroupMediaReader | None = None,
    ) -> list[TrainSequence]:
        """Return some of the group's sequences, ready for packing into micro-batches.

        Args:
            indices: indices of the sequences in the group.
            packed: names of the columns that the sequences carry.
            algorithm: source of the token weights.
            temperature: sampling temperature.
            prompt: the column with the prompt that sequences share.
            version: version of the weights that compute the trainer's log-probs; None if they have no version. Tokens
                of this version have comparable log-probs, unless the sequence spans a weight update with a stale cache.
            media: reads the media, for a model that takes them.

        Raises:
            AlgorithmError: the algorithm's token weights are invalid.
        """
        seen = None if media is None else media.read(self.columns)
        columns, bounds = self.columns, bounds_of(self.lengths)
        weights = token_weights_of(algorithm, columns["loss_mask"], self.sample_lengths)
        routed = bounds_of(self.routed_tokens) if ROUTED_EXPERTS in packed else None
        names = [name for name in packed if name != ROUTED_EXPERTS]
        shared = columns[prompt]
        chosen = []
        for index in indices:
            own = slice(int(bounds[index]), int(bounds[index + 1]))
            chosen.append(
                TrainSequence.from_response(
                    shared if columns["shares_prompt"][index] else shared[:0],
                    columns["tokens"][own],
                    loss_mask=columns["loss_mask"][own],
                    columns={name: columns[name][own] for name in names},
                    weight=weights[own],
                    logprobs_comparable=version is not None
                    and (columns["versions"][own] == version) & (columns["spans_weight_update"][index] == 0),
                    temperature=temperature,
                    media=None if seen is None else seen[index],
                    experts=None if routed is None else columns[ROUTED_EXPERTS][routed[index] : routed[index + 1]],
                )
            )
        return chosen


def bounds_of(lengths: NDArray[np.integer] | Sequence[int]) -> NDArray[np.int64]:
    """Return the offset of each section in per-token columns, then the end of the last one, int64 [sections + 1]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def check_group(
    group_id: str,
    columns: Mapping[str, Any],
    names: Collection[str],
    routing: RoutingShape | None = None,
    candidates: int | None = None,
    media: MediaTokens | None = None,
) -> TrainGroup:
    """Validate a group's columns.

    Args:
        group_id: the group.
        columns: its columns.
        names: the columns that the run's train stage needs.
        routing: shape that the routed experts must fit; None if they are known to fit, or there are none.
        candidates: required number of candidates per token; None: any number, equal in all columns.
        media: the model's tokens for media, which the group's must fit; None if they are known to fit.

    Raises:
        MalformedGroup: a column is missing, has a wrong kind or size, or is NaN or infinite at a trained token; or its
            sequences don't fit the samples or the prompt, its media its tokens, or its routed experts the model.
    """
    for name in names:
        if name not in columns:
            raise MalformedGroup(f"column {name} is missing")
    if _array(columns, "prompt_tokens").size == 0:
        raise MalformedGroup(
            "prompt_tokens is empty: it must have a token, from which the first response token is predicted"
        )
    lengths = _array(columns, "lengths")
    if lengths.size == 0 or (lengths < 0).any():
        raise MalformedGroup(f"lengths is {lengths.tolist()}: it must have a length for each sequence, none negative")
    sizes = {
        "n": (_array(columns, "reward").size, "samples"),
        "S": (lengths.size, "sequences"),
        "T": (int(lengths.sum()), "response tokens"),
        "T, k": (int(lengths.sum()), "response tokens"),
    }
    for name in names:
        column = COLUMNS[name]
        if column.shape not in sizes:
            continue
        count, what = sizes[column.shape]
        if column.dtype == "json":
            if not isinstance(columns[name], list) or len(columns[name]) != count:
                raise MalformedGroup(f"{name} must be a list of {count} values, one for each of the {what}")
        elif len(_array(columns, name)) != count:
            raise MalformedGroup(f"{name} has {len(columns[name])} values for {count} {what}")
    widths = {name: columns[name].shape[1] for name in names if COLUMNS[name].shape == "T, k"}
    if len({*widths.values(), *([] if candidates is None else [candidates])}) > 1:
        have = " and ".join(f"{name} {width}" for name, width in widths.items())
        wanted = "as many" if candidates is None else str(candidates)
        raise MalformedGroup(f"for each token {have} candidates: columns of candidates must have {wanted}")
    _check_sequences(columns)
    if TEACHER_PROMPT_TOKENS in names and not (columns["shares_prompt"].all() and columns[TEACHER_PROMPT_TOKENS].size):
        raise MalformedGroup(
            "a sequence begins with a prompt of its own, or the teacher's prompt is empty: the teacher's prompt "
            "(roles.teacher.privileged_key) can't be put in its place"
        )
    if CRITIC_STATE in names:
        _check_critic_state(columns[CRITIC_STATE])
    if PROMPT_MEDIA in names or SEQUENCE_MEDIA in names:
        try:
            check_media(columns, media)
        except ValueError as error:
            raise MalformedGroup(str(error)) from error
    if not isinstance(weights := columns.get(REFERENCE_WEIGHTS, ""), str):
        raise MalformedGroup(f"{REFERENCE_WEIGHTS} is {weights!r}: it must be the name of the reference's weights")
    masked = columns["loss_mask"] != 0
    for name in names:
        column = COLUMNS[name]
        if column.shape in ("T", "T, k") and column.kinds == "f" and not np.isfinite(columns[name][masked]).all():
            raise MalformedGroup(f"{name} is NaN or infinite at a trained token")
    group = TrainGroup(group_id, {name: columns[name] for name in names})
    return group.with_columns({ROUTED_EXPERTS: _experts(group, routing)}) if ROUTED_EXPERTS in names else group


def _experts(group: TrainGroup, routing: RoutingShape | None) -> NDArray[np.unsignedinteger]:
    """Check the column of routed experts, and return it in the narrowest dtype, for step files."""
    experts = group.columns[ROUTED_EXPERTS]
    if not isinstance(experts, np.ndarray) or experts.ndim != 3 or experts.dtype.kind not in "iu":
        raise MalformedGroup(f"{ROUTED_EXPERTS} must be an array of integers [rows, layers, top_k]")
    if len(experts) != (rows := sum(group.routed_tokens)):
        raise MalformedGroup(
            f"{ROUTED_EXPERTS} has {len(experts)} rows: it must have {rows}, one for each token of prompt and answer "
            "but the last of each sequence"
        )
    if routing is not None:
        if experts.shape[1:] != (routing.layers, routing.top_k):
            raise MalformedGroup(
                f"{ROUTED_EXPERTS} has {list(experts.shape[1:])} experts for each token: the model has "
                f"[layers, top_k] = [{routing.layers}, {routing.top_k}]"
            )
        if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < routing.experts:
            raise MalformedGroup(
                f"{ROUTED_EXPERTS} has numbers from {experts.min()} to {experts.max()}: the model's experts are 0 to "
                f"{routing.experts - 1}"
            )
    fits = experts.dtype == np.uint8 or not experts.size or int(experts.max()) < 256
    return experts.astype(np.uint8 if fits else np.uint16, copy=False)


def _check_critic_state(state: Any) -> None:
    fits = isinstance(state, dict) and isinstance(state.get("step"), int) and isinstance(state.get("metrics"), dict)
    if not fits:
        raise MalformedGroup(f'{CRITIC_STATE} is {state!r}: it must be {{"step": a number, "metrics": an object}}')


def _check_sequences(columns: Mapping[str, Any]) -> None:
    """Check that each sample's sequences are consecutive, and that no trained token is the first of a sequence."""
    samples, of_sequence = columns["reward"].size, columns["sample_of_sequence"]
    if of_sequence[0] != 0 or of_sequence[-1] != samples - 1 or not np.isin(np.diff(of_sequence), (0, 1)).all():
        raise MalformedGroup(
            f"sample_of_sequence is {of_sequence.tolist()}: it must ascend from 0 to {samples - 1}, with at least one "
            f"sequence for each of the {samples} samples"
        )
    lengths, begins = columns["lengths"], bounds_of(columns["lengths"])
    for index in np.flatnonzero(columns["shares_prompt"] == 0):
        if lengths[index] == 0 or columns["loss_mask"][begins[index]]:
            raise MalformedGroup(
                f"sequence {index} has shares_prompt 0, so it must begin with a prompt of its own: a token with "
                "loss_mask 0"
            )


def _array(columns: Mapping[str, Any], name: str) -> np.ndarray:
    value, kinds, wide = columns[name], COLUMNS[name].kinds, COLUMNS[name].shape == "T, k"
    if not isinstance(value, np.ndarray) or value.ndim != 1 + wide or value.dtype.kind not in kinds:
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        shape = "[values, candidates]" if wide else "[values]"
        raise MalformedGroup(f"{name} is {what}: it must be an array {shape} of kind {' or '.join(kinds)}")
    return value


def model_of(config: RunConfig, role: str, columns: Mapping[str, Any]) -> str:
    """Return the name of the model that scores a group with these columns.

    Raises:
        ValueError: no teacher is configured for the group's source.
    """
    if role != TEACHER:
        return config.roles.frozen[role].model
    teacher = config.roles.teacher
    prompt = columns.get("prompt")
    source = prompt["metadata"].get("data_source") if isinstance(prompt, dict) else None
    if not (model := teacher.model_of(source)):
        raise ValueError(f"{teacher.section}.models {teacher.without(source, 'the group')}")
    return model
