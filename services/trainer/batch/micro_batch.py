"""Packing of sequences into micro-batches: pure functions on numpy arrays."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from relaxd.board import COLUMNS
from services.trainer.batch.sequence_media import PackedMedia, SequenceMedia, pack_media
from services.trainer.megatron.rank_messages import message

UNROUTED = -1
"""Expert id that means: the router chooses this token's experts."""


class PackingError(ValueError):
    """Raised if sequences can't be packed into a micro-batch."""


@dataclass(frozen=True)
class TrainSequence:
    """Sequence of L tokens, prompt first. Per-token arrays are aligned with `tokens`."""

    tokens: NDArray[np.int64]
    """Token ids of prompt and response, int64 [L tokens]."""
    loss_mask: NDArray[np.uint8]
    """Loss mask: 1 for tokens to train on; 0 for the first token, which nothing predicts; uint8 [L tokens]."""
    columns: Mapping[str, NDArray[Any]]
    """Board columns that the loss reads, by name, and "rollout_logprobs": float32 [L tokens]. Columns of candidates are
    [L tokens, k], with int32 ids."""
    weight: NDArray[np.float32]
    """Weight of each token in the loss, from `Algorithm.token_weights`, float32 [L tokens]."""
    logprobs_comparable: NDArray[np.uint8]
    """Mask: 1 for trained tokens whose log-prob is comparable with the engine's, uint8 [L tokens]."""
    temperature: float = 1.0
    """Temperature at which the response was sampled."""
    prompt_length: int = 0
    """Number of prompt tokens that neighbouring sequences share and `pack` stores once; 0 without a shared prompt."""
    experts: NDArray[np.int16] | None = None
    """Ids of the experts that routers must use, or UNROUTED, int16 [L tokens, layers, top_k]. None: routers choose for
    all tokens."""
    media: SequenceMedia | None = None
    """Images, videos and sounds among the tokens; None if there are none."""

    @classmethod
    def from_response(
        cls,
        prompt: NDArray[np.integer],
        response: NDArray[np.integer],
        *,
        loss_mask: NDArray[np.uint8],
        columns: Mapping[str, NDArray[Any]],
        weight: NDArray[np.float32],
        logprobs_comparable: NDArray[np.bool_] | bool = True,
        temperature: float = 1.0,
        experts: NDArray[np.integer] | None = None,
        media: SequenceMedia | None = None,
    ) -> Self:
        """Make a sequence from columns without the shared prompt, as on the board.

        Args:
            prompt: [P] token ids; empty for a sequence whose response begins with its own prompt.
            response: [R] token ids.
            loss_mask: uint8 [R].
            columns: [R] or [R, k] each; floats become float32, ids int32.
            weight: float32 [R].
            logprobs_comparable: [R] or one value: whether the log-prob is comparable with the engine's, because the
                engine had the same weights and a cache written by them.
            temperature: sampling temperature, > 0.
            experts: [P + R - 1, layers, top_k]: experts of all tokens except the last, which predicts nothing.
            media: media of the prompt and in the response, if there are any.

        Raises:
            PackingError: lengths differ, nothing predicts the first trained token, or the temperature isn't positive.
        """
        if len(prompt) == 0 and (len(response) == 0 or loss_mask[0]):
            raise PackingError(
                "prompt is empty: it must have a token, from which the first response token is predicted"
            )
        if not temperature > 0:
            raise PackingError(f"temperature is {temperature}: it must be positive")
        comparable = loss_mask * np.broadcast_to(logprobs_comparable, len(response))

        def padded(name: str, column: NDArray[Any], dtype: type) -> NDArray[Any]:
            if len(column) != len(response):
                raise PackingError(f"{name} has {len(column)} values for {len(response)} response tokens")
            return np.concatenate([np.zeros((len(prompt), *column.shape[1:]), dtype), np.asarray(column, dtype)])

        return cls(
            tokens=np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)]),
            loss_mask=padded("loss_mask", loss_mask, np.uint8),
            columns={
                name: padded(name, column, np.float32 if column.dtype.kind == "f" else np.int32)
                for name, column in columns.items()
            },
            weight=padded("weight", weight, np.float32),
            logprobs_comparable=padded("logprobs_comparable", comparable, np.uint8),
            temperature=temperature,
            prompt_length=len(prompt),
            experts=None if experts is None else _with_last(experts, len(prompt) + len(response)),
            media=media,
        )


@message
@dataclass(frozen=True, kw_only=True)
class PackedMicroBatch:
    """Consecutive sequences as one row of T tokens. Arrays are aligned as in `TrainSequence`.

    A prompt that several sequences share is stored once, in the first of them; the others have only their responses.
    """

    tokens: NDArray[np.int64]
    """Token ids of the row, int64 [T tokens]."""
    positions: NDArray[np.int64] | NDArray[np.float32]
    """Position of each token in its sequence, int64 [T tokens]. With media, positions in time, row and column,
    float32 [3, T tokens]."""
    cu_seqlens: NDArray[np.int32]
    """Index of each sequence's first token in the row, then the row's length T, int32 [sequences + 1]."""
    prefixes: NDArray[np.int32]
    """Start in the row and length of the prompt that each sequence shares with an earlier one, int32 [sequences, 2].

    The length is 0 if an earlier sequence stores no prompt for this one.
    """
    previous: NDArray[np.int64]
    """Row index of each token's predecessor in its sequence, which predicts the token, int64 [T tokens]; -1 for a
    sequence's first token."""
    loss_mask: NDArray[np.uint8]
    """Loss mask: 1 for tokens to train on, uint8 [T tokens]."""
    columns: Mapping[str, NDArray[Any]]
    """Columns that the loss reads, by name: float32 [T tokens]; columns of candidates [T tokens, k], with int32 ids."""
    weight: NDArray[np.float32]
    """Weight of each token in the loss, float32 [T tokens]."""
    logprobs_comparable: NDArray[np.uint8]
    """Mask: 1 for trained tokens whose log-prob is comparable with the engine's, uint8 [T tokens]."""
    temperature: NDArray[np.float32]
    """Sampling temperature of each token's sequence, float32 [T tokens]."""
    experts: NDArray[np.int16] | None = None
    """Ids of the experts that routers must use, or UNROUTED, int16 [T tokens, layers, top_k]. None: routers choose
    for all tokens."""
    media: PackedMedia | None = None
    """Media of the packed sequences; None if there are none."""

    @property
    def sequences(self) -> int:
        """Number of sequences in the micro-batch."""
        return len(self.cu_seqlens) - 1

    @property
    def sequence_of_token(self) -> NDArray[np.int64]:
        """Index of the sequence with which each token is stored, int64 [T tokens]."""
        return np.repeat(np.arange(self.sequences), np.diff(self.cu_seqlens))

    def places_of(self, sequence: int) -> NDArray[np.int64]:
        """Return the row indices of a sequence's tokens, int64 [L tokens], including a prompt that an earlier sequence
        stores."""
        prompt, shared = self.prefixes[sequence].tolist()
        begin, end = self.cu_seqlens[sequence : sequence + 2].tolist()
        return np.concatenate((np.arange(prompt, prompt + shared), np.arange(begin, end)))


def pack(sequences: Sequence[TrainSequence], *, share_prompts: bool = True) -> PackedMicroBatch:
    """Pack sequences into one micro-batch, in this order.

    Sequences of a group start with the same prompt, whose hidden states are the same for all of them under causal
    attention. So the prompt is computed once, and its gradient is the sum over the sequences.

    Args:
        sequences: at least one, all with the same columns, and either all or none with experts. Sequences
            without a shared prompt may stand between sequences that share one.
        share_prompts: whether to store a prompt once for the sequences that share it.

    Raises:
        PackingError: there are no sequences.
    """
    if not sequences:
        raise PackingError("a micro-batch needs at least one sequence: use empty_micro_batch() as padding")
    starts, prefixes, previous, positions = [0], [], [], []
    owner: int | None = None
    for i, sequence in enumerate(sequences):
        shared = share_prompts and owner is not None and _same_prompt(sequences[owner], sequence)
        prefix = (starts[owner], sequence.prompt_length) if shared and owner is not None else (0, 0)
        if sequence.prompt_length and not shared:
            owner = i
        begin, own = starts[-1], len(sequence.tokens) - prefix[1]
        before = np.arange(begin - 1, begin + own - 1, dtype=np.int64)
        before[:1] = prefix[0] + prefix[1] - 1
        starts.append(begin + own)
        prefixes.append(prefix)
        previous.append(before)
        positions.append(np.arange(prefix[1], len(sequence.tokens), dtype=np.int64))
    stored = [
        (start, skipped, one.media)
        for start, one, (_, skipped) in zip(starts, sequences, prefixes, strict=False)
        if one.media is not None
    ]
    media = pack_media(stored)

    def row(column: Callable[[TrainSequence], NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([column(one)[skipped:] for one, (_, skipped) in zip(sequences, prefixes, strict=True)])

    return PackedMicroBatch(
        tokens=row(lambda one: one.tokens),
        positions=np.concatenate(positions) if media is None else _positions_with_media(sequences, prefixes),
        cu_seqlens=np.array(starts, np.int32),
        prefixes=np.array(prefixes, np.int32),
        previous=np.concatenate(previous),
        loss_mask=row(lambda one: one.loss_mask),
        columns={name: row(lambda one, name=name: one.columns[name]) for name in sequences[0].columns},  # type: ignore[misc]
        weight=row(lambda one: one.weight),
        logprobs_comparable=row(lambda one: one.logprobs_comparable),
        temperature=np.repeat(np.array([one.temperature for one in sequences], np.float32), np.diff(starts)),
        experts=None if sequences[0].experts is None else row(lambda one: cast(NDArray[np.int16], one.experts)),
        media=media,
    )


def empty_micro_batch(columns: Iterable[str]) -> PackedMicroBatch:
    """Return a micro-batch with these columns and no trained token, for ranks with fewer micro-batches than others.

    Routers choose its experts.
    """
    zeros, mask = np.zeros(1, np.float32), np.zeros(1, np.uint8)
    return pack([TrainSequence(np.zeros(1, np.int64), mask, no_values(columns, 1), zeros, mask)])


def no_values(columns: Iterable[str], tokens: int) -> dict[str, NDArray[Any]]:
    """Return columns for untrained tokens: zeros [tokens], and candidates with k = 0."""
    return {
        name: np.zeros((tokens, 0) if COLUMNS[name].shape == "T, k" else tokens, COLUMNS[name].dtype)
        for name in columns
    }


def with_padding(batch: PackedMicroBatch, multiple: int) -> PackedMicroBatch:
    """Return the micro-batch with an untrained sequence appended, so that its tokens are a multiple of `multiple`."""
    length = len(batch.tokens)
    missing = -length % multiple
    if missing == 0:
        return batch

    def padded(array: NDArray[Any], by: Any = 0) -> NDArray[Any]:
        added = np.broadcast_to(np.asarray(by, array.dtype), (missing, *array.shape[1:]))
        return np.concatenate([array, added])

    added = np.arange(missing)
    return PackedMicroBatch(
        tokens=padded(batch.tokens),
        positions=padded(batch.positions.T, added if batch.media is None else np.stack([added] * 3, 1)).T,
        cu_seqlens=np.append(batch.cu_seqlens, np.int32(length + missing)),
        prefixes=np.concatenate([batch.prefixes, np.zeros((1, 2), np.int32)]),
        previous=padded(batch.previous, [-1, *range(length, length + missing - 1)]),
        loss_mask=padded(batch.loss_mask),
        columns={name: padded(column) for name, column in batch.columns.items()},
        weight=padded(batch.weight),
        logprobs_comparable=padded(batch.logprobs_comparable),
        temperature=padded(batch.temperature, 1.0),
        experts=None if batch.experts is None else padded(batch.experts, UNROUTED),
        media=batch.media,
    )


def _positions_with_media(
    sequences: Sequence[TrainSequence], prefixes: Sequence[tuple[int, int]]
) -> NDArray[np.float32]:
    """Return token positions in time, row and column for packed sequences, some with media, float32 [3, T tokens]."""
    rows = []
    for sequence, (_, skipped) in zip(sequences, prefixes, strict=True):
        tokens = len(sequence.tokens)
        plain = np.tile(np.arange(tokens, dtype=np.float32), (3, 1))
        rows.append((plain if sequence.media is None else sequence.media.positions_of(tokens))[:, skipped:])
    return np.concatenate(rows, axis=1)


def _with_last(experts: NDArray[np.integer], tokens: int) -> NDArray[np.int16]:
    """Return `experts` with a row of UNROUTED appended, for the last token."""
    if len(experts) != tokens - 1:
        raise PackingError(f"experts has {len(experts)} rows: it must have {tokens - 1}, for all tokens but the last")
    found = np.full((tokens, *experts.shape[1:]), UNROUTED, np.int16)
    found[:-1] = experts
    return found


def _same_prompt(first: TrainSequence, second: TrainSequence) -> bool:
    """Return True if sequences begin with the same prompt: equal tokens, and equal media in them."""
    length = first.prompt_length
    if length != second.prompt_length or _hashes(first) != _hashes(second):
        return False
    return bool((first.tokens[:length] == second.tokens[:length]).all())


def _hashes(sequence: TrainSequence) -> list[str]:
    return [] if sequence.media is None else sequence.media.hashes_before(sequence.prompt_length)
