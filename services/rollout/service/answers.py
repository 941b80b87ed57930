"""Unfinished answers of a group, and their copies on the board for the next replica that takes the group."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from relaxd import telemetry
from relaxd.board import (
    CONTINUED,
    OFF_POLICY_TOKENS,
    ROUTED_EXPERTS,
    STUDENT_CANDIDATES,
    WEIGHT_RECEIPTS,
    Board,
    BoardError,
    Column,
    Delivery,
)
from relaxd.config import RunConfig
from relaxd.process.child import ChildError
from relaxd.weights.receipts import Receipt
from services.rollout.engines.request_types import FinishReason, Output

logger = logging.getLogger(__name__)


@dataclass
class Answer:
    """A sample's outputs so far, from one or more engines, and its state."""

    outputs: list[Output] = field(default_factory=list)
    saved: int = 0
    """Number of leading `outputs` that are saved on the board."""
    continued: int = 0
    """Number of times that an interrupted answer was continued."""
    off_policy_tokens: int = 0
    """Number of tokens at the answer's start that are not trained on."""
    cut: int = 0
    """Answer's length when it was last continued, in tokens; 0 after new output and without off-policy masking."""

    @property
    def ended(self) -> bool:
        """True if the answer is finished: its last output has a finish reason."""
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def length(self) -> int:
        """Number of tokens of the answer so far."""
        return sum(len(output.tokens) for output in self.outputs)

    @property
    def versions(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Weight version that generated each token, int64 [length]."""
        return _joined((output.versions for output in self.outputs), np.int64)

    def take(self, output: Output) -> None:
        """Append an engine's output. An aborted output leaves the answer unfinished, so that it can be continued."""
        if output.finish_reason == "abort":
            output = replace(output, finish_reason=None, text="")
        if self.cut and len(output.tokens):
            self._mask(int(output.versions[0]))  # may be newer than the version given to `go_on`
            self.cut = 0
        if len(output.tokens) or output.finish_reason is not None:
            self.outputs.append(output)

    def go_on(self, version: int, *, mask_off_policy: bool) -> None:
        self.continued += 1
        if mask_off_policy:
            self.cut = self.length
            self._mask(version)

    def _mask(self, version: int) -> None:
        older = np.flatnonzero(self.versions[: self.cut] < version)
        self.off_policy_tokens = int(older[-1]) + 1 if older.size else 0


class Answers:
    """Answers of a group, finished or not, one per sample."""

    def __init__(self, n: int) -> None:
        self._answers = [Answer() for _ in range(n)]

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def ended(self) -> bool:
        """True if all answers are finished."""
        return all(answer.ended for answer in self._answers)

    @property
    def unfinished(self) -> int:
        """Number of unfinished answers."""
        return sum(not answer.ended for answer in self._answers)

    @property
    def tokens(self) -> int:
        """Total number of tokens of all answers so far."""
        return sum(answer.length for answer in self._answers)

    @property
    def unsaved_tokens(self) -> int:
        """Largest number of tokens of an answer that are not saved on the board."""
        return max(sum(len(output.tokens) for output in answer.outputs[answer.saved :]) for answer in self._answers)

    @property
    def begun(self) -> dict[int, tuple[int, ...]]:
        """Tokens of each unfinished answer, by index; {} if no answer has any output."""
        if not any(answer.outputs for answer in self._answers):
            return {}
        return {
            index: tuple(_joined((output.tokens for output in answer.outputs), np.int32).tolist())
            for index, answer in enumerate(self._answers)
            if not answer.ended
        }

    def take(self, output: Output) -> None:
        """Append an engine's output to the answer that the output names."""
        self._answers[output.sample].take(output)

    def go_on(self, version: int, *, mask_off_policy: bool) -> None:
        """Record that unfinished answers are continued with weight version `version` or a newer one.

        With `mask_off_policy`, an answer's tokens up to the last one from older weights will not be trained on.
        """
        for answer in self._answers:
            if answer.outputs and not answer.ended:
                answer.go_on(version, mask_off_policy=mask_off_policy)

    def oldest_version(self) -> int | None:
        """Return the oldest weight version that generated a token to train on; None without such tokens."""
        versions = [answer.versions[answer.off_policy_tokens :] for answer in self._answers]
        return min((int(each.min()) for each in versions if each.size), default=None)

    def unsaved(self) -> tuple[dict[str, Column], int, list[int]]:
        """Return the unsaved outputs as columns, the number of unsaved tokens, and the argument for `mark_saved`."""
        rows = [(answer, output) for answer in self._answers for output in _merged(answer.outputs[answer.saved :])]
        outputs = [output for _, output in rows]
        columns = _columns(rows) | {"sample": np.array([output.sample for output in outputs], dtype=np.int32)}
        if (likeliest := _likeliest(outputs)).size:
            columns[STUDENT_CANDIDATES] = likeliest
        return columns, len(columns["tokens"]), [len(answer.outputs) for answer in self._answers]

    def mark_saved(self, mark: Sequence[int]) -> None:
        """Record that the outputs that `unsaved` returned together with `mark` are saved on the board."""
        for answer, count in zip(self._answers, mark, strict=True):
            answer.saved = count

    def take_saved(self, parts: Sequence[Mapping[str, Column]]) -> None:
        """Append the outputs that earlier holders of the group saved; `parts` are in order of saving."""
        for part in parts:
            columns = cast(Mapping[str, Any], part)
            ends, likeliest = np.cumsum(columns["lengths"]), columns.get(STUDENT_CANDIDATES)
            receipts = columns.get(WEIGHT_RECEIPTS)
            for row, sample in enumerate(columns["sample"].tolist()):
                own = slice(int(ends[row] - columns["lengths"][row]), int(ends[row]))
                answer = self._answers[sample]
                answer.outputs.append(
                    Output(
                        sample,
                        columns["tokens"][own],
                        columns["rollout_logprobs"][own],
                        columns["versions"][own],
                        cast(FinishReason | None, columns["finish"][row]),
                        columns["text"][row],
                        bool(columns["spans_weight_update"][row]),
                        receipts=[] if receipts is None else [Receipt(*one) for one in receipts[row]],
                        likeliest=[] if likeliest is None else likeliest[own],
                    )
                )
                answer.saved = len(answer.outputs)
                answer.continued = int(columns[CONTINUED][row])
                answer.off_policy_tokens = int(columns[OFF_POLICY_TOKENS][row])

    def columns(self, names: Iterable[str]) -> dict[str, Column]:
        """Return the named columns of the group. All answers must be finished.

        Raises ValueError if `names` has routed experts or likeliest tokens, and an answer lacks them.
        """
        ended = [_merged(answer.outputs)[0] for answer in self._answers]
        columns = _columns(list(zip(self._answers, ended, strict=True)))
        lengths = columns["lengths"]
        columns |= {
            "sample_of_sequence": np.arange(len(ended), dtype=np.int32),
            "shares_prompt": np.ones(len(ended), dtype=np.uint8),
            "loss_mask": _trained(lengths, columns[OFF_POLICY_TOKENS]),
        }
        if ROUTED_EXPERTS in names:
            found = [output.routed_experts for output in ended if output.routed_experts is not None]
            if len(found) < len(ended):
                raise ValueError("rollout.return_routed_experts is true, but the engine returned none")
            columns[ROUTED_EXPERTS] = np.concatenate(found)
        if STUDENT_CANDIDATES in names:
            columns[STUDENT_CANDIDATES] = likeliest = _likeliest(ended)
            if len(likeliest) != lengths.sum() or not likeliest.size:
                raise ValueError(
                    f"the algorithm compares the student's likeliest tokens, but the engine returned them for "
                    f"{len(likeliest) if likeliest.size else 0} of {lengths.sum()} tokens"
                )
        return {name: columns[name] for name in names}


def _columns(rows: Sequence[tuple[Answer, Output]]) -> dict[str, Any]:
    """Return outputs as columns, which have one row per output, or the tokens of all outputs in order."""
    outputs = [output for _, output in rows]
    return {
        "lengths": np.array([len(output.tokens) for output in outputs], dtype=np.int32),
        "tokens": _joined((output.tokens for output in outputs), np.int32),
        "rollout_logprobs": _joined((output.logprobs for output in outputs), np.float32),
        "versions": _joined((output.versions for output in outputs), np.int64),
        "finish": [output.finish_reason for output in outputs],
        "text": [output.text for output in outputs],
        "spans_weight_update": np.array([output.spans_weight_update for output in outputs], dtype=np.uint8),
        CONTINUED: np.array([answer.continued for answer, _ in rows], dtype=np.int32),
        OFF_POLICY_TOKENS: np.array([answer.off_policy_tokens for answer, _ in rows], dtype=np.int32),
        WEIGHT_RECEIPTS: [list(output.receipts) for output in outputs],
    }


def _merged(outputs: Sequence[Output]) -> list[Output]:
    """Join consecutive outputs of a sample into a list of at most one output."""
    if len(outputs) < 2:
        return list(outputs)
    merged = replace(
        outputs[-1],
        tokens=_joined((output.tokens for output in outputs), np.int32),
        logprobs=_joined((output.logprobs for output in outputs), np.float32),
        versions=_joined((output.versions for output in outputs), np.int64),
        receipts=list(dict.fromkeys(one for output in outputs for one in output.receipts)),
        likeliest=_likeliest(outputs),
        spans_weight_update=any(output.spans_weight_update for output in outputs),
    )
    return [merged]


def _joined(arrays: Iterable[Any], dtype: Any) -> Any:
    """Concatenate arrays into one array of type `dtype`."""
    return np.concatenate([np.empty(0, dtype), *(np.asarray(array, dtype=dtype) for array in arrays)])


def _likeliest(outputs: Sequence[Output]) -> Any:
    """Return the likeliest tokens at all positions, int32 [tokens, k]; an empty array if none were requested."""
    found = [np.asarray(output.likeliest, dtype=np.int32) for output in outputs if len(output.likeliest)]
    return np.concatenate(found) if found else np.empty((0, 0), np.int32)


def _trained(lengths: Any, masked: Any) -> Any:
    """Return the loss mask of joined sequences, uint8 [tokens]: 0 for each sequence's first `masked` tokens, else 1.

    `lengths` and `masked`: numbers of tokens, int [sequences].
    """
    places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (places >= np.repeat(masked, lengths)).astype(np.uint8)


class KeptAnswers:
    """Loads and saves the answers of one delivery of a group on the board.

    Without rollout.partial.enabled it saves nothing, and answers that are cut off start again.
    """

    def __init__(
        self, config: RunConfig, board: Board, delivery: Delivery, hold: Callable[[str], Delivery | None]
    ) -> None:
        """`hold`: function that returns the newest delivery of a group that this replica holds, or None."""
        self.answers = Answers(config.rollout.samples_per_prompt)
        partial = config.rollout.partial
        self._partial = partial
        self._max_staleness = config.board.max_staleness if partial.max_staleness is None else partial.max_staleness
        self._board = board
        self._delivery = delivery
        self._hold = hold
        self._pointers: str | None = ""
        """Pointers to the answers' saved parts on the board; None after another holder has changed them."""
        self._saved_tokens = 0
        """Number of tokens saved on the board during this delivery."""
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Load from the board the answers that earlier holders of the group saved."""
        if not self._partial.enabled:
            return
        saved = await asyncio.to_thread(self._board.saved, self._delivery)
        self._pointers = saved.pointers
        if saved.pointers and not saved.parts:
            await self._forget()
        self.answers.take_saved(saved.parts)
        self._count(self.answers.tokens, "continued")

    async def go_on(self, version: int) -> int:
        """Prepare the answers for an engine that continues them with weight version `version`.

        Restarts all answers, without tokens, if they may not be continued. Returns the oldest weight version of the
        group's tokens to train on, at most `version`.
        """
        self.answers.go_on(version, mask_off_policy=self._partial.mask_off_policy)
        oldest = self.answers.oldest_version()
        if oldest is not None and not self._partial.enabled:
            self.answers, oldest = Answers(len(self.answers)), None
        elif oldest is not None and version - oldest > self._max_staleness:
            logger.info(
                "group %s is generated again: its %d tokens are up to %d versions old, and at most %d may be continued",
                *(self._delivery.group_id, self.answers.tokens, version - oldest, self._max_staleness),
            )
            self._count(self.answers.tokens, "discarded")
            await self._forget()
            oldest = None
        return version if oldest is None else min(oldest, version)

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Save the answers regularly while the block runs, and again if the block is cancelled or the engine fails."""
        if not self._partial.enabled:
            yield
            return
        regularly = asyncio.create_task(self._save_regularly(), name="save unfinished answers")
        try:
            yield
        except (asyncio.CancelledError, ChildError):  # the group is handed back, or the engine is gone
            await asyncio.shield(self._save())
            raise
        finally:
            regularly.cancel()

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._partial.save_seconds)  # idle: saves the answers again
            if self.answers.unsaved_tokens >= self._partial.save_tokens:
                await asyncio.shield(self._save())

    async def _save(self) -> None:
        """Save new outputs on the board, if this replica still holds the group."""
        async with self._lock:
            hold = self._hold(self._delivery.group_id)
            if hold is None or self._pointers is None:
                return
            answers = self.answers  # `go_on` may replace them meanwhile
            columns, tokens, mark = answers.unsaved()
            if not columns["finish"]:
                return
            forgiven = self._saved_tokens + tokens >= self._partial.save_tokens
            try:
                self._pointers = await asyncio.to_thread(
                    self._board.save, hold, columns, after=self._pointers, forgiven=forgiven
                )
            except BoardError as error:
                logger.warning("%d tokens of group %s could not be kept: %s", tokens, hold.group_id, error)
                return
            if self._pointers is not None:
                answers.mark_saved(mark)
                self._saved_tokens += tokens
                self._count(tokens, "saved")

    async def _forget(self) -> None:
        """Discard the answers, and remove their saved parts from the board."""
        async with self._lock:
            self.answers = Answers(len(self.answers))
            hold = self._hold(self._delivery.group_id)
            if self._pointers and hold is not None:
                forgotten = await asyncio.to_thread(self._board.forget_saved, hold, self._pointers)
                self._pointers = "" if forgotten else None

    def _count(self, tokens: int, outcome: str) -> None:
        if tokens:
            labels = {"relaxd.run_id": self._board.run_id, "relaxd.outcome": outcome}
            telemetry.record("partial.tokens", tokens, labels)
