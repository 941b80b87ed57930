"""The stage "reference": takes groups from the board, packs several into one forward pass, commits their log-probs."""

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relaxd.board import REF_LOGPROBS, STAGES, Board, Column, Delivery, Drop, DropReason, StageWorker
from relaxd.board.worker import Result
from services.trainer.batch.round_packer import Packer
from services.trainer.batch.row_packing import PackedMicroBatch, TrainSequence, pack

STAGE = "reference"
NEEDS = STAGES[STAGE].needs
BATCHES_PER_STAGE = 20
"""Micro-batches of one pass for each pipeline stage after the first: stages then wait for each other in a twentieth of
the time."""
LEAST_GROUPS = 2
"""Groups to hold at least: while one is computed, another is loaded."""

logger = logging.getLogger(__name__)

Compute = Callable[[Sequence[PackedMicroBatch]], list[NDArray[np.float32]]]
"""Computes the log-probs of micro-batches on all ranks: for each float32 [T], aligned with its tokens."""


@dataclass(frozen=True)
class _Group:
    """A group that waits for its log-probs."""

    group_id: str
    prompt_tokens: int
    """Tokens of the shared prompt."""
    sequences: list[TrainSequence]
    lengths: list[int]
    """Tokens of each sequence, without the shared prompt."""
    logprobs: NDArray[np.float32]
    """float32 [T]: the result, filled sequence by sequence."""
    answer: "Future[Result]" = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        """Tokens of its sequences, with the shared prompt once."""
        return self.prompt_tokens + len(self.logprobs)


class ReferenceStage:
    """Works on the stage. The worker takes, holds and commits groups; `run` computes, in the caller's thread."""

    def __init__(
        self,
        board: Board,
        consumer: str,
        compute: Compute,
        *,
        temperature: float,
        micro_batch_tokens: int,
        pipeline_stages: int = 1,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Prepare; `worker.start` begins to take groups.

        Args:
            board: the run's board.
            consumer: the replica's id.
            compute: runs the model.
            temperature: sampling temperature.
            micro_batch_tokens: maximum tokens of a micro-batch. A group with a longer sequence is dropped.
            pipeline_stages: ranks that share the layers.
            on_failure: called with the reason when the worker fails.
        """
        self._compute = compute
        self._temperature = temperature
        self._budget = micro_batch_tokens
        self._batches = max(1, BATCHES_PER_STAGE * (pipeline_stages - 1))
        self._waiting: queue.SimpleQueue[_Group] = queue.SimpleQueue()
        self._group_tokens = 0.0
        """Moving average of the tokens of a group."""
        self.turns = 0
        """Counts passes through the model, whose length is bounded whatever the size of a group, and idle waits."""
        self.worker = StageWorker(
            board, STAGE, consumer, self._process, concurrency=self._most_groups, on_failure=on_failure
        )

    def run(self, wait_seconds: float) -> bool:
        """Compute the log-probs of waiting groups, one pass' worth; wait for the first. Returns whether there was one.

        Raises whatever `compute` raises.
        """
        groups = self._next(wait_seconds)
        packer = Packer(self._budget, dp_size=1)
        for group in groups.values():
            shares = [one.prompt_length for one in group.sequences]
            packer.add(group.group_id, group.prompt_tokens, group.lengths, shares)
        if (packed := packer.rest()) is None:
            self.turns += 1
            return False
        (micro_batches,) = packed.micro_batches
        for begin in range(0, len(micro_batches), self._batches):
            members = [
                [(groups[piece.group_id], index) for piece in pieces for index in piece.sequences]
                for pieces in micro_batches[begin : begin + self._batches]
            ]
            rows = [pack([group.sequences[index] for group, index in row]) for row in members]
            for row, batch, logprobs in zip(members, rows, self._compute(rows), strict=True):
                for (group, index), end in zip(row, batch.cu_seqlens[1:], strict=True):
                    offset, length = sum(group.lengths[:index]), group.lengths[index]
                    group.logprobs[offset : offset + length] = logprobs[end - length : end]
            self.turns += 1
        for group in groups.values():
            group.answer.set_result({REF_LOGPROBS: group.logprobs})
        return True

    def _next(self, wait_seconds: float) -> dict[str, _Group]:
        """Return the groups of one pass, at least one unless none came within `wait_seconds`."""
        groups: dict[str, _Group] = {}
        try:
            group = self._waiting.get(timeout=wait_seconds)
            groups[group.group_id] = group
            while sum(group.tokens for group in groups.values()) < self._batches * self._budget:
                group = self._waiting.get_nowait()
                groups[group.group_id] = group
        except queue.Empty:
            pass
        return groups

    def _process(self, delivery: Delivery, columns: Mapping[str, Column]) -> "Result | Future[Result]":
        """Queue a group. Runs in the worker's threads."""
        try:
            group = _group(delivery.group_id, columns, self._temperature)
        except ValueError as error:
            logger.error("group %s is dropped: %s", delivery.group_id, error)
            return Drop(DropReason.MALFORMED)
        longest = max(len(sequence.tokens) for sequence in group.sequences)
        if longest > self._budget:
            logger.error(
                "group %s is dropped: a sequence has %d tokens with its prompt, but a micro-batch has at most %d: "
                "raise roles.reference.micro_batch_tokens, or limit prompts and answers to fewer tokens",
                *(delivery.group_id, longest, self._budget),
            )
            return Drop(DropReason.TOO_LONG)
        self._group_tokens = group.tokens if not self._group_tokens else 0.9 * self._group_tokens + 0.1 * group.tokens
        self._waiting.put(group)
        return group.answer

    def _most_groups(self) -> int:
        """Return how many groups to hold: two passes' worth, so that other replicas get the rest."""
        if not self._group_tokens:
            return LEAST_GROUPS
        return max(LEAST_GROUPS, round(2 * self._batches * self._budget / self._group_tokens))


def _group(group_id: str, columns: Mapping[str, Column], temperature: float) -> _Group:
    """Make a group of columns. Raises ValueError: they are malformed."""
    arrays = {name: np.asarray(columns[name]) for name in NEEDS}
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays.values()):
        raise ValueError(f"{', '.join(NEEDS)} must be arrays [values] of integers")
    prompt, tokens, lengths = arrays["prompt_tokens"], arrays["tokens"], arrays["lengths"]
    mask, shares = arrays["loss_mask"], arrays["shares_prompt"]
    if not lengths.size or (lengths < 0).any() or not int(lengths.sum()) == len(tokens) == len(mask):
        raise ValueError(
            f"lengths add up to {int(lengths.sum())}, but tokens has {len(tokens)} values and loss_mask {len(mask)}"
        )
    if len(shares) != len(lengths):
        raise ValueError(f"shares_prompt has {len(shares)} values for {len(lengths)} sequences")
    sequences = []
    for end, length, shared in zip(np.cumsum(lengths), lengths, shares, strict=True):
        own = slice(int(end - length), int(end))
        sequences.append(
            TrainSequence.from_response(
                prompt if shared else prompt[:0],
                tokens[own],
                loss_mask=(mask[own] != 0).astype(np.uint8),
                columns={},
                weight=np.zeros(int(length), np.float32),  # of the loss, which is not computed here
                temperature=temperature,
            )
        )
    return _Group(group_id, len(prompt), sequences, lengths.tolist(), np.zeros(len(tokens), np.float32))
