"""Packing of samples into micro-batches: pure functions on numpy arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class PackingError(ValueError):
    """A sample can't be packed."""


@dataclass(frozen=True)
class TrainSample:
    """One trajectory, prompt first. Per-token arrays are [L], aligned with `tokens`."""

    tokens: NDArray[np.int64]
    """int64 [L]: token ids of prompt and response."""
    loss_mask: NDArray[np.uint8]
    """uint8 [L]: 1 for tokens to train on; 0 for the first token, which nothing predicts."""
    rollout_logprobs: NDArray[np.float32]
    """float32 [L]: log-probs that the engine reported."""
    advantages: NDArray[np.float32]
    """float32 [L]: advantages."""
    weight: NDArray[np.float32]
    """float32 [L]: aggregation weight, from `Algorithm.token_weights`."""
    logprobs_comparable: NDArray[np.uint8]
    """uint8 [L]: 1 for trained tokens whose log-prob is comparable with the engine's."""
    temperature: float = 1.0
    """Sampling temperature."""
    prompt_length: int = 0
    """Number of prompt tokens, which `pack` stores once for neighbours that share them; 0: no prompt."""
    ref_logprobs: NDArray[np.float32] | None = None
    """float32 [L]: log-probs under the reference, if they are known."""

    @classmethod
    def from_response(
        cls,
        prompt: NDArray[np.integer],
        response: NDArray[np.integer],
        *,
        loss_mask: NDArray[np.uint8],
        rollout_logprobs: NDArray[np.float32],
        advantages: NDArray[np.float32],
        weight: NDArray[np.float32],
        logprobs_comparable: NDArray[np.bool_] | bool = True,
        temperature: float = 1.0,
        ref_logprobs: NDArray[np.float32] | None = None,
    ) -> Self:
        """Make a sample from columns without the prompt, as on the board.

        Args:
            prompt: [P] token ids, at least one.
            response: [R] token ids.
            loss_mask: uint8 [R].
            rollout_logprobs: float32 [R].
            advantages: float32 [R].
            weight: float32 [R].
            logprobs_comparable: [R] or one value: whether the log-prob is comparable with the engine's, because the
                engine had the same weights and a cache written by them.
            temperature: sampling temperature, > 0.
            ref_logprobs: float32 [R].

        Raises:
            PackingError: lengths differ, the prompt is empty, or the temperature isn't positive.
        """
        if len(prompt) == 0:
            raise PackingError(
                "prompt is empty: it must have a token, from which the first response token is predicted"
            )
        if not temperature > 0:
            raise PackingError(f"temperature is {temperature}: it must be positive")
        columns: dict[str, tuple[NDArray[Any], type]] = {
            "loss_mask": (loss_mask, np.uint8),
            "rollout_logprobs": (rollout_logprobs, np.float32),
            "advantages": (advantages, np.float32),
            "weight": (weight, np.float32),
            "logprobs_comparable": (loss_mask * np.broadcast_to(logprobs_comparable, len(response)), np.uint8),
        }
        if ref_logprobs is not None:
            columns["ref_logprobs"] = (ref_logprobs, np.float32)
        padded: dict[str, NDArray[Any]] = {}
        for name, (column, dtype) in columns.items():
            if len(column) != len(response):
                raise PackingError(f"{name} has {len(column)} values for {len(response)} response tokens")
            padded[name] = np.concatenate([np.zeros(len(prompt), dtype), np.asarray(column, dtype)])
        return cls(
            tokens=np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)]),
            temperature=temperature,
            prompt_length=len(prompt),
            **padded,
        )


@dataclass(frozen=True)
class PackedMicroBatch:
    """Consecutive samples as one row of T tokens. Arrays are aligned as in `TrainSample`.

    A prompt shared by neighbours is stored once, in the first of them; the others have only their responses.
    """

    tokens: NDArray[np.int64]
    """int64 [T]."""
    positions: NDArray[np.int64]
    """int64 [T]: position of each token in its sample."""
    cu_seqlens: NDArray[np.int32]
    """int32 [samples + 1]: begin of each sample's tokens, and T."""
    prefixes: NDArray[np.int32]
    """int32 [samples, 2]: begin and length of the shared prompt stored with an earlier sample (length 0: none)."""
    previous: NDArray[np.int64]
    """int64 [T]: index of the previous token in the sample, which predicts this one; -1 for the first."""
    loss_mask: NDArray[np.uint8]
    """uint8 [T]."""
    rollout_logprobs: NDArray[np.float32]
    """float32 [T]."""
    advantages: NDArray[np.float32]
    """float32 [T]."""
    weight: NDArray[np.float32]
    """float32 [T]."""
    logprobs_comparable: NDArray[np.uint8]
    """uint8 [T]."""
    temperature: NDArray[np.float32]
    """float32 [T]."""
    ref_logprobs: NDArray[np.float32] | None = None
    """float32 [T]: log-probs under the reference. None: the learner computes them if needed."""


def pack(samples: Sequence[TrainSample], *, share_prompts: bool = True) -> PackedMicroBatch:
    """Pack samples into one micro-batch, in this order.

    The samples of a group start with the same prompt, whose hidden states are the same for all of them under causal
    attention. So the prompt is computed once, and its gradient is the sum of theirs.

    Args:
        samples: at least one; samples that share a prompt are neighbours.
        share_prompts: store the prompts of neighbours once.

    Raises:
        PackingError: there are no samples, or one has arrays of different lengths, no token, or trains on its prompt.
    """
    if not samples:
        raise PackingError("a micro-batch needs at least one sample: use empty_micro_batch() as padding")
    for i, sample in enumerate(samples):
        _check(i, sample)
    starts, prefixes, previous, positions = [0], [], [], []
    owner = 0
    for i, sample in enumerate(samples):
        shared = share_prompts and i > owner and _same_prompt(samples[owner], sample)
        owner = owner if shared else i
        prefix = (starts[owner], sample.prompt_length) if shared else (0, 0)
        begin, own = starts[-1], len(sample.tokens) - prefix[1]
        before = np.arange(begin - 1, begin + own - 1, dtype=np.int64)
        before[:1] = prefix[0] + prefix[1] - 1
        starts.append(begin + own)
        prefixes.append(prefix)
        previous.append(before)
        positions.append(np.arange(prefix[1], len(sample.tokens), dtype=np.int64))
    columns = {
        field.name: np.concatenate(
            [getattr(sample, field.name)[skipped:] for sample, (_, skipped) in zip(samples, prefixes, strict=True)]
        )
        for field in fields(TrainSample)
        if field.name not in ("temperature", "prompt_length") and getattr(samples[0], field.name) is not None
    }
    return PackedMicroBatch(
        positions=np.concatenate(positions),
        cu_seqlens=np.array(starts, np.int32),
        prefixes=np.array(prefixes, np.int32),
        previous=np.concatenate(previous),
        temperature=np.repeat(np.array([sample.temperature for sample in samples], np.float32), np.diff(starts)),
        **columns,
    )


def empty_micro_batch() -> PackedMicroBatch:
    """Return a micro-batch without trained tokens, for ranks with fewer micro-batches than others."""
    zeros = np.zeros(1, np.float32)
    mask = np.zeros(1, np.uint8)
    return pack([TrainSample(np.zeros(1, np.int64), mask, zeros, zeros, zeros, mask)])


def with_padding(batch: PackedMicroBatch, multiple: int) -> PackedMicroBatch:
    """Add an untrained sequence at the end, so that T is a multiple of `multiple`."""
    missing = -len(batch.tokens) % multiple
    if missing == 0:
        return batch
    padded = {
        field.name: np.concatenate([value, np.zeros(missing, value.dtype)])
        for field in fields(batch)
        if (value := getattr(batch, field.name)) is not None and field.name not in ("cu_seqlens", "prefixes")
    }
    padded["positions"][-missing:] = np.arange(missing)
    padded["previous"][-missing:] = np.arange(missing) + len(batch.tokens) - 1
    padded["previous"][-missing] = -1
    padded["temperature"][-missing:] = 1.0
    cu_seqlens = np.append(batch.cu_seqlens, np.int32(len(batch.tokens) + missing))
    prefixes = np.concatenate([batch.prefixes, np.zeros((1, 2), np.int32)])
    return replace(batch, cu_seqlens=cu_seqlens, prefixes=prefixes, **padded)


def assign(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide sequences among micro-batches of at most `budget` tokens: first fit, longest first.

    Sequences of similar length come together, which reduces padding in attention on CPU.

    Args:
        lengths: tokens of each sequence.
        budget: largest number of tokens in a micro-batch.

    Returns:
        For each micro-batch the indices of its sequences, ascending. Deterministic.

    Raises:
        PackingError: a sequence is longer than the budget.
    """
    for i, length in enumerate(lengths):
        if length > budget:
            raise PackingError(
                f"sample {i} has {length} tokens, but trainer.micro_batch_tokens is {budget}: "
                "raise it, or limit prompts and answers to fewer tokens"
            )
    batches: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for batch, free in enumerate(room):
            if lengths[i] <= free:
                batches[batch].append(i)
                room[batch] -= lengths[i]
                break
        else:
            batches.append([i])
            room.append(budget - lengths[i])
    return [sorted(batch) for batch in batches]


def assign_to_ranks(lengths: Sequence[int], budget: int, dp_size: int) -> list[list[list[int]]]:
    """Divide sequences among data-parallel ranks and their micro-batches, with about the same work for each rank.

    Args:
        lengths: tokens of each sequence.
        budget: largest number of tokens in a micro-batch.
        dp_size: number of data-parallel ranks.

    Returns:
        For each rank its micro-batches, each a list of indices; every rank has the same number of them, padded with
        empty lists (to be trained as `empty_micro_batch`).

    Raises:
        PackingError: a sequence is longer than the budget.
    """
    if dp_size > 1 and lengths:
        total = sum(lengths)
        rounds = -(-total // (dp_size * budget))
        budget = min(budget, max(max(lengths), -(-total // (dp_size * rounds)))) if max(lengths) <= budget else budget
    batches = assign(lengths, budget)
    rounds = -(-len(batches) // dp_size)
    shares: list[list[list[int]]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for batch in sorted(batches, key=lambda batch: -sum(lengths[i] for i in batch)):
        rank = min((r for r in range(dp_size) if len(shares[r]) < rounds), key=lambda r: (loads[r], r))
        shares[rank].append(batch)
        loads[rank] += sum(lengths[i] for i in batch)
    return [share + [[] for _ in range(rounds - len(share))] for share in shares]


def _same_prompt(first: TrainSample, second: TrainSample) -> bool:
    length = first.prompt_length
    return 0 < length == second.prompt_length and bool((first.tokens[:length] == second.tokens[:length]).all())


def _check(index: int, sample: TrainSample) -> None:
    count = len(sample.tokens)
    if count == 0:
        raise PackingError(f"sample {index} has no tokens")
    for field in fields(sample):
        value = getattr(sample, field.name)
        if isinstance(value, np.ndarray) and value.shape != (count,):
            raise PackingError(f"sample {index}: {field.name} is {list(value.shape)}, but tokens is [{count}]")
    if sample.loss_mask[: sample.prompt_length].any():
        raise PackingError(f"sample {index}: loss_mask is 1 within the prompt, whose tokens aren't trained on")
    if sample.loss_mask[0]:
        raise PackingError(f"sample {index}: loss_mask[0] is 1, but nothing predicts the first token")
