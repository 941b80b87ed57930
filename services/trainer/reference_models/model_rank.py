"""One rank of a replica that holds a model and works on a stage, a child process of the service; and the stage, which
packs several groups into one forward pass and commits the columns.
"""

import logging
import queue
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd import telemetry
from relaxd.board import (
    STUDENT_CANDIDATES,
    Board,
    Column,
    Delivery,
    Drop,
    DropReason,
    StageWorker,
    read_sequences,
)
from relaxd.board.worker import Result
from relaxd.config import RunConfig, TrainerConfig
from relaxd.media.media_tokens import MediaTokens
from relaxd.roles import ROLES
from relaxd.v1 import rank_pb2 as pb
from relaxd.v1 import rank_pb2_grpc
from services.trainer.batch.micro_batch import PackedMicroBatch, TrainSequence, pack
from services.trainer.batch.micro_batch_division import Packer
from services.trainer.batch.sequence_media import GroupMediaReader, SequenceMedia, check_media
from services.trainer.loop.commanded_rank import RankThread

BATCHES_PER_STAGE = 20
"""Number of micro-batches in a pass, per pipeline stage after the first. A stage then idles for about a twentieth of
the pass."""
LEAST_GROUPS = 2
"""Minimum number of groups to hold: one is computed while another is loaded from the board."""

logger = logging.getLogger(__name__)

Compute = Callable[[str, Sequence[PackedMicroBatch]], list[dict[str, NDArray[Any]]]]
"""Computes the stage's columns on all ranks, from a model's name and micro-batches. Returns columns by name for each
micro-batch: [T] or [T, k], aligned with its T tokens."""


@dataclass(frozen=True)
class _Group:
    """A group that waits for the model's output."""

    group_id: str
    model: str
    """Name of the model that scores the group."""
    prompt_tokens: int
    """Number of tokens in the shared prompt."""
    sequences: list[TrainSequence]
    lengths: list[int]
    """Number of tokens in each sequence, without the shared prompt."""
    tokens: int
    """Number of tokens in all sequences, with the shared prompt counted once."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Computed columns, filled sequence by sequence: [T] or [T, k] each, T tokens without the shared prompt."""
    answer: "Future[Result]" = field(default_factory=Future)

    def fill(self, index: int, name: str, values: NDArray[Any]) -> None:
        """Write the values of sequence `index` into a column."""
        if name not in self.columns:
            self.columns[name] = np.zeros((sum(self.lengths), *values.shape[1:]), values.dtype)
        begin = sum(self.lengths[:index])
        self.columns[name][begin : begin + len(values)] = values


class ModelStage:
    """Works on a role's stage. A worker takes and commits groups; `run` computes columns in the caller's thread."""

    def __init__(
        self,
        board: Board,
        role: str,
        consumer: str,
        compute: Compute,
        *,
        vocab_sizes: Mapping[str, int],
        model_of: Callable[[Mapping[str, Column]], str] = lambda columns: "",
        prompt: str = "prompt_tokens",
        temperature: float,
        micro_batch_tokens: int,
        of_student: int = 0,
        media: Mapping[str, MediaTokens] = MappingProxyType({}),
        pipeline_stages: int = 1,
        of_each: Callable[[], Mapping[str, Column]] = dict,
        what: str = "log-prob",
        reason: DropReason = DropReason.NO_LOGPROBS,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create the stage. Groups are taken once `worker.start` is called.

        Args:
            board: the run's board.
            role: the role that holds the model.
            consumer: the replica's id.
            compute: runs the model.
            vocab_sizes: vocabulary size of each model, by name. A group with a token beyond it is dropped.
            model_of: chooses the model by a group's columns. Raises ValueError if no model fits.
            prompt: the column with the prompt that the model gets.
            temperature: sampling temperature.
            micro_batch_tokens: maximum tokens of a micro-batch. A group with a longer sequence is dropped.
            of_student: number of tokens in STUDENT_CANDIDATES to score in each place; 0: none.
            media: tokens that stand for media in each model with towers, by name; empty if prompts have no media.
            pipeline_stages: ranks that share the layers.
            of_each: returns further columns, the same for all groups of a pass.
            what: name of the model's output for each token, for errors.
            reason: drop reason of a group without output for a token.
            on_failure: called with the reason when the worker fails.
        """
        self._role, self._stage = role, ROLES[role].stage
        self._compute = compute
        self._vocab_sizes = vocab_sizes
        self._model_of = model_of
        self._prompt = prompt
        self._temperature = temperature
        self._budget = micro_batch_tokens
        self._of_student = of_student
        self._media = {name: GroupMediaReader(tokens) for name, tokens in media.items()}
        self._of_each = of_each
        self._what, self._reason = what, reason
        self._batches = max(1, BATCHES_PER_STAGE * (pipeline_stages - 1))
        self._waiting: queue.SimpleQueue[_Group] = queue.SimpleQueue()
        self._group_tokens = 0.0
        """Moving average of the number of tokens per group."""
        self.turns = 0
        """Number of model passes plus waits without a group. It grows steadily unless the stage is stuck."""
        self.worker = StageWorker(
            board,
            self._stage,
            consumer,
            self._process,
            concurrency=self._most_groups,
            in_order=True,
            on_failure=on_failure,
        )

    def run(self, wait_seconds: float) -> bool:
        """Wait for a group, then run one pass over the waiting groups. Return False if no group came.

        Raises whatever `compute` raises.
        """
        groups = self._next(wait_seconds)
        if not groups:
            self.turns += 1
            return False
        for model in dict.fromkeys(group.model for group in groups.values()):
            self._run(model, {name: group for name, group in groups.items() if group.model == model})
        for group in groups.values():
            group.answer.set_result(self._result(group))
        return True

    def _run(self, model: str, groups: Mapping[str, _Group]) -> None:
        """Fill the columns of `groups` with the outputs of one model. `groups` must not be empty."""
        packer = Packer(self._budget, dp_size=1)
        for group in groups.values():
            shares = [one.prompt_length for one in group.sequences]
            packer.add(group.group_id, group.prompt_tokens, group.lengths, shares)
        packed = packer.rest()
        assert packed is not None
        (micro_batches,) = packed.micro_batches
        for begin in range(0, len(micro_batches), self._batches):
            members = [
                [(groups[piece.group_id], index) for piece in pieces for index in piece.sequences]
                for pieces in micro_batches[begin : begin + self._batches]
            ]
            rows = [pack([group.sequences[index] for group, index in row]) for row in members]
            for row, batch, columns in zip(members, rows, self._compute(model, rows), strict=True):
                for (group, index), end in zip(row, batch.cu_seqlens[1:], strict=True):
                    for name, values in columns.items():
                        group.fill(index, name, values[end - group.lengths[index] : end])
            self.turns += 1

    def _result(self, group: _Group) -> Result:
        """Return a group's computed columns, or a Drop if a value isn't finite."""
        for values in group.columns.values():
            finite = np.isfinite(values).reshape(len(values), -1).all(-1)
            if wrong := int(np.count_nonzero(~finite)):
                return self._drop(
                    self._reason,
                    group.group_id,
                    f"the {self._role} gives {wrong} of its {len(values)} tokens a {self._what} that isn't finite",
                )
        return {**group.columns, **self._of_each()}

    def _drop(self, reason: DropReason, group_id: str, detail: str) -> Drop:
        logger.error("group %s is dropped: %s", group_id, detail)
        return Drop(reason, detail=detail)

    def _next(self, wait_seconds: float) -> dict[str, _Group]:
        """Take waiting groups for one pass. Return {} if none came within `wait_seconds`."""
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
        """Queue a delivered group for `run`, or drop it if the model can't score it. Runs in the worker's threads."""
        try:
            model = self._model_of(columns)
        except ValueError as error:
            return self._drop(DropReason.NO_LOGPROBS, delivery.group_id, str(error))
        try:
            group = _group(
                delivery.group_id,
                model,
                columns,
                self._prompt,
                self._temperature,
                of_student=self._of_student,
                media=self._media.get(model),
            )
        except ValueError as error:
            return self._drop(DropReason.MALFORMED, delivery.group_id, str(error))
        largest = max(int(sequence.tokens.max(initial=0)) for sequence in group.sequences)
        if largest >= self._vocab_sizes[model]:
            return self._drop(
                self._reason,
                group.group_id,
                f"it has token {largest}, but the {self._role} has only {self._vocab_sizes[model]} tokens",
            )
        longest = max(len(sequence.tokens) for sequence in group.sequences)
        if longest > self._budget:
            return self._drop(
                DropReason.TOO_LONG,
                group.group_id,
                f"a sequence has {longest} tokens with its prompt, but a micro-batch has at most {self._budget}: raise "
                f"roles.{self._role}.micro_batch_tokens, or limit prompts and answers to fewer tokens",
            )
        self._group_tokens = group.tokens if not self._group_tokens else 0.9 * self._group_tokens + 0.1 * group.tokens
        self._waiting.put(group)
        return group.answer

    def _most_groups(self) -> int:
        """Return the number of groups to hold: enough for two passes. Other replicas get the rest."""
        if not self._group_tokens:
            return LEAST_GROUPS
        return max(LEAST_GROUPS, round(2 * self._batches * self._budget / self._group_tokens))


def _group(
    group_id: str,
    model: str,
    columns: Mapping[str, Column],
    prompt: str,
    temperature: float,
    *,
    of_student: int,
    media: GroupMediaReader | None,
) -> _Group:
    """Prepare a group for scoring. `prompt`: name of the prompt's column. Raises ValueError for malformed columns."""
    read = read_sequences(columns, prompt)
    lengths = [len(one.tokens) for one in read]
    seen: Sequence[SequenceMedia | None] = [None] * len(read)
    if media is not None:
        check_media(columns, media.tokens)
        seen = media.read(columns)
    own: list[dict[str, NDArray[Any]]] = [{} for _ in read]
    if of_student:
        candidates = _student_candidates(columns[STUDENT_CANDIDATES], sum(lengths), of_student)
        own = [{STUDENT_CANDIDATES: part} for part in np.split(candidates, np.cumsum(lengths)[:-1])]
    sequences = [
        TrainSequence.from_response(
            one.prompt,
            one.tokens,
            loss_mask=one.loss_mask,
            columns=of_sequence,
            weight=np.zeros(len(one.tokens), np.float32),  # of the loss, which is not computed here
            temperature=temperature,
            media=media_of_sequence,
        )
        for one, of_sequence, media_of_sequence in zip(read, own, seen, strict=True)
    ]
    prompt_tokens = len(np.asarray(columns[prompt]))
    return _Group(group_id, model, prompt_tokens, sequences, lengths, prompt_tokens + sum(lengths))


def _student_candidates(column: Column, tokens: int, count: int) -> NDArray[np.integer]:
    """Check the student's candidate tokens, [tokens, count]. Raises ValueError."""
    ids = np.asarray(column)
    if ids.dtype.kind not in "iu" or ids.shape != (tokens, count):
        raise ValueError(
            f"{STUDENT_CANDIDATES} is {ids.dtype} {list(ids.shape)}: it must be integers [{tokens}, {count}], "
            "algorithm.distill_top_k in the place of each of the answers' tokens"
        )
    ordered = np.sort(ids, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if repeated.any():
        place = int(np.flatnonzero(repeated.any(1))[0])
        raise ValueError(f"{STUDENT_CANDIDATES}[{place}] is {ids[place].tolist()}: no token may be there twice")
    return ids


class ModelRank(rank_pb2_grpc.RankServicer):
    """RPC handlers and computing thread of a rank that scores groups. It refuses calls about weight broadcasts.

    Subclasses implement `_compute`.
    """

    def __init__(self) -> None:
        self._thread = RankThread()
        self._stage: ModelStage | None = None
        self._reported = pb.RankProgress()

    async def Work(self, request: pb.WorkRequest, context: Any) -> AsyncIterator[pb.WorkResponse]:
        """Start the computing thread. Stream its events, such as progress, to the parent."""
        self._thread.start(request, self._compute)
        async for event in self._thread.events:
            yield event

    def SetPaused(self, request: pb.SetPausedRequest, context: Any) -> pb.SetPausedResponse:
        """Pause or resume taking groups from the board."""
        if self._stage is not None:
            (self._stage.worker.pause if request.paused else self._stage.worker.resume)()
        return pb.SetPausedResponse()

    def HandBackGroups(self, request: pb.HandBackGroupsRequest, context: Any) -> pb.HandBackGroupsResponse:
        """Finish held groups within `seconds`, and hand back the others."""
        if self._stage is not None:
            self._stage.worker.drain(request.seconds)
            self._clean_up()
            telemetry.flush()  # the parent kills the ranks next
        return pb.HandBackGroupsResponse(done=self._stage is None or not self._stage.worker.held)

    def _clean_up(self) -> None:
        """Hook for subclasses: finish remaining work before the parent kills the ranks."""

    @abstractmethod
    def _compute(self, request: pb.WorkRequest, config: RunConfig) -> None:
        """Load the model, and score groups until the process ends."""

    def _report_loading(self, detail: str) -> None:
        self._thread.events.put(pb.WorkResponse(progress=pb.RankProgress(detail=detail)))

    def _report_progress(self, detail: str = "") -> None:
        if (stage := self._stage) is not None:
            progress = pb.RankProgress(
                detail=detail, held_groups=stage.worker.held, done_groups=stage.worker.done, iterations=stage.turns
            )
            if progress != self._reported:
                self._reported = progress
                self._thread.events.put(pb.WorkResponse(progress=progress))


def world_config(config: RunConfig, role: str) -> TrainerConfig:
    """Return the trainer's configuration, with the parallel sizes of a replica of this role."""
    own = config.roles.sizes[role]
    return config.trainer.model_copy(
        update={
            "ranks": own.ranks,
            "hosts": 1,
            "tensor_parallel": own.tensor_parallel,
            "pipeline_parallel": own.pipeline_parallel,
            "pipeline_layers": (),
            "pipeline_chunks": 1,
            "context_parallel": own.context_parallel,
            "expert_parallel": own.expert_parallel,
            "micro_batch_tokens": own.micro_batch_tokens or config.micro_batch_tokens,
            "threads": own.threads,
            "recompute": "none" if role in config.roles.frozen else config.trainer.recompute,
        }
    )
