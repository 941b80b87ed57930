"""Runs a step's rounds of micro-batches on one rank, for live and replayed steps alike."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import AlgorithmError, Filtered, create
from relaxd.algorithms.advantage_terms import Whitening
from relaxd.algorithms.base import AdvantagesAndReturns, ValuedGroup
from relaxd.algorithms.results import advantages_of, returns_of
from relaxd.board import (
    ADVANTAGES,
    COLUMNS,
    LOSS_MASK,
    OLD_LOGPROBS,
    RETURNS,
    ROUTED_EXPERTS,
    TEACHER_PROMPT_TOKENS,
    VALUES,
    DropReason,
    stages_for,
)
from relaxd.config import RunConfig
from relaxd.roles import TEACHER
from services.trainer.batch.groups import TrainGroup, check_group, model_of
from services.trainer.batch.micro_batch import PackedMicroBatch, TrainSequence, empty_micro_batch, pack
from services.trainer.batch.sequence_media import GroupMediaReader
from services.trainer.batch.step_plan import MicroBatchRound, MicroBatchSlices, StepFile, StepFileError, StepPlan
from services.trainer.learner.frozen_model import COLUMNS_OF
from services.trainer.learner.learner import Learner
from services.trainer.learner.update import UpdateStats

logger = logging.getLogger(__name__)

ROLLOUT_LOGPROBS = "rollout_logprobs"
"""Column of the engine's log-probs. The learner compares them with its own, even if the algorithm doesn't need them."""

PreparedColumns = dict[tuple[str, int], dict[str, NDArray[Any]]]
"""Columns of each sequence, by (group id, sequence index): [tokens] or [tokens, k], without a shared prompt;
ROUTED_EXPERTS is [tokens with the prompt - 1, layers, top_k]."""


class GroupFailed(ValueError):
    """The prepared columns show that a group can't be trained on."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ColumnPass(NamedTuple):
    """Forward passes that compute columns before a step's updates."""

    columns: tuple[str, ...]
    """Names of the columns that the passes compute."""
    compute: Callable[[Sequence[PackedMicroBatch]], list[dict[str, NDArray[Any]]]]
    """Computes these columns of each micro-batch, by name: [T], [T, k] or [T, layers, top_k], T tokens."""
    prompt: str = "prompt_tokens"
    """Name of the column that holds the prompts for these passes."""
    is_for: Callable[[TrainGroup], bool] = lambda group: True
    """Returns True for groups whose columns these passes compute."""


class RoundRunner:
    """Computes columns with forward passes and accumulates gradients, round by round of a step."""

    def __init__(self, learner: Learner, config: RunConfig) -> None:
        self._learner = learner
        self._algorithm = create(config.algorithm)
        self._temperature = config.rollout.temperature
        self._media = None if learner.media_tokens is None else GroupMediaReader(learner.media_tokens)
        self.columns = stages_for(config)[-1].needs
        """Names of the columns that the trainer reads from groups."""
        needs = self._algorithm.needs
        needed = dict.fromkeys((ROLLOUT_LOGPROBS, *needs.loss, ROUTED_EXPERTS))
        self._packed_columns = [name for name in needed if name in self.columns]
        self._forward: list[ColumnPass] = []
        """Forward passes before a step's updates."""
        several = config.trainer.updates_per_step > 1
        self.makes_advantages = ADVANTAGES not in self.columns
        """True if the trainer computes the advantages, because they need columns from its forward passes."""
        of_advantages = needs.advantages if self.makes_advantages else ()
        if config.trainer.routing_replay == "trainer":
            self._forward.append(ColumnPass((OLD_LOGPROBS, ROUTED_EXPERTS), partial(_routed, learner)))
        elif (needs.old_logprobs and several) or OLD_LOGPROBS in of_advantages:
            self._forward.append(ColumnPass((OLD_LOGPROBS,), partial(_named, OLD_LOGPROBS, learner.log_probs)))
        for role, columns in COLUMNS_OF.items():
            wanted = {*needs.loss, *of_advantages}.difference(self.columns)
            own = tuple(name for name in columns if name in wanted)
            # A teacher with separate prompts, or one of several teachers, has other rows than the student.
            privileged = role == TEACHER and TEACHER_PROMPT_TOKENS in self.columns
            names = list(dict.fromkeys(config.roles.frozen[role].settings.values()))
            early = several or privileged or len(names) > 1 or set(own).intersection((*of_advantages, *needs.finite))
            if not own or not early:
                continue
            prompt = TEACHER_PROMPT_TOKENS if privileged else "prompt_tokens"
            for name in names:
                compute = partial(learner.frozen_columns, roles=(role,), name=name)
                self._forward.append(ColumnPass(own, compute, prompt, partial(_is_asked, config, role, name)))
        if needs.values and VALUES not in self.columns:
            self._forward.append(ColumnPass((VALUES,), partial(_named, VALUES, learner.values)))
        self._candidates = needs.candidates.width if needs.candidates is not None else 0
        self._computed = tuple(dict.fromkeys(name for one in self._forward for name in one.columns))
        """Names of the columns that the forward passes compute."""
        self._prepared = (
            *self._computed,
            *((RETURNS,) if needs.values else ()),
            *((ADVANTAGES,) if needs.values or self.makes_advantages else ()),
        )
        """Names of the columns that the trainer adds or replaces before a step's updates."""

    @property
    def prepares(self) -> bool:
        """True if `prepare` must compute columns before a step's updates, which then all use the same values."""
        return bool(self._forward)

    def own_groups(self, entry: MicroBatchRound) -> set[str]:
        """Return the ids of the groups whose columns this rank needs in a round."""
        own = entry.micro_batches[self._learner.world.dp_rank]
        return {piece.group_id for micro_batch in own for piece in micro_batch}

    def prepare(self, entry: MicroBatchRound, groups: Mapping[str, TrainGroup]) -> list[PreparedColumns]:
        """Compute columns with forward passes over this rank's micro-batches. Skip groups that aren't in `groups`.

        Returns:
            The columns of each micro-batch.
        """
        own = entry.micro_batches[self._learner.world.dp_rank]
        prepared: list[PreparedColumns] = [{} for _ in own]
        for one in self._forward:
            # Routed experts are recorded with the student's prompt.
            left_out = () if one.prompt == "prompt_tokens" else (ROUTED_EXPERTS,)
            packed = [name for name in self._packed_columns if name not in left_out]
            asked = {group_id: group for group_id, group in groups.items() if one.is_for(group)}
            # Also micro-batches that are now empty: all ranks make the same calls.
            batches = [self._packed(micro_batch, asked, packed, one.prompt) for micro_batch in own]
            for micro_batch, batch, columns, found in zip(own, batches, one.compute(batches), prepared, strict=True):
                sequences = ((piece.group_id, i) for piece in micro_batch for i in piece.sequences)
                loaded = (key for key in sequences if key[0] in asked)
                for place, (group_id, index) in enumerate(loaded):
                    of_sequence = found.setdefault((group_id, index), {})
                    places, own_tokens = batch.places_of(place), int(groups[group_id].lengths[index])
                    for name, row in columns.items():
                        # A shared prompt is before the sequence's own tokens.
                        chosen = places[:-1] if name == ROUTED_EXPERTS else places[len(places) - own_tokens :]
                        of_sequence[name] = row[chosen]
        return prepared

    def prepared_columns(self, group: TrainGroup, prepared: PreparedColumns) -> dict[str, NDArray[Any]]:
        """Return the trainer's additional columns of a step's group: [T] each, by name.

        Args:
            group: the group without these columns.
            prepared: results of forward passes. Where they are missing, values and advantages become NaN, candidates
                -1, and experts are left out: such a step can't be trained.

        Raises:
            GroupFailed: a frozen model gives the group a log-prob that isn't finite, or the algorithm fails on it.
        """
        columns = {
            name: np.concatenate(
                [
                    prepared.get((group.group_id, index), {}).get(name, self._missing(name, length))
                    for index, length in enumerate(group.lengths.tolist())
                ]
            )
            for name in self._computed
        }
        filtered = False
        self._check_log_probs(group, columns, prepared)
        try:
            if self.makes_advantages:
                columns[ADVANTAGES], filtered = self.advantages(group.with_columns(columns))
            if self._algorithm.needs.values:
                columns |= self._valued(group.with_columns(columns), filtered=filtered)._asdict()
        except AlgorithmError as error:
            raise GroupFailed(DropReason.ALGORITHM_FAILED, str(error)) from error
        return columns

    def run(
        self,
        entry: MicroBatchRound,
        groups: Mapping[str, TrainGroup],
        whitening: Whitening | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Run forward and backward on this rank's micro-batches of a round. Skip groups that aren't in `groups`.

        Args:
            entry: the round.
            groups: groups by id.
            whitening: normalisation of the packed advantages; the groups' columns stay unchanged.
            last: whether it is the last round of its update.
        """
        own = entry.micro_batches[self._learner.world.dp_rank]
        columns = list(dict.fromkeys((*self._packed_columns, *self._prepared)))
        batches = [self._packed(micro_batch, groups, columns) for micro_batch in own]
        if whitening is not None:
            batches = [_whitened(batch, whitening) for batch in batches]
        self._learner.accumulate(batches, last=last)

    def replay(self, file: StepFile, skipped_updates: Collection[int] | None) -> list[UpdateStats]:
        """Replay a whole step.

        Args:
            file: the step's plan and columns.
            skipped_updates: `StepPlan.skipped_updates` of the ledger: these updates are skipped again, all others are
                repeated. None: unknown; an update is skipped if its loss or gradient isn't finite.

        Returns:
            The statistics of each update.

        Raises:
            StepFileError: the file lacks a column that the trainer prepares.
            NonFiniteGradients: an update that was applied before isn't finite now.
        """
        groups = {group_id: self.recorded(group_id, file) for group_id in file.plan.groups}
        return self.train(file.plan, groups, skipped_updates)

    def train(
        self, plan: StepPlan, groups: Mapping[str, TrainGroup], skipped_updates: Collection[int] | None = None
    ) -> list[UpdateStats]:
        """Run all updates of a step on groups with prepared columns; see `replay`."""
        updates = []
        for index, mini_batch in enumerate(plan.updates):
            for number, entry in enumerate(mini_batch.rounds, 1):
                self.run(entry, groups, plan.whitening, last=number == len(mini_batch.rounds))
            skip = None if skipped_updates is None else index in skipped_updates
            updates.append(self._learner.update(mini_batch.normalizer, skip=skip))
        self._learner.end_step(plan.refreshed)
        return updates

    def _check_log_probs(
        self, group: TrainGroup, columns: Mapping[str, NDArray[Any]], prepared: PreparedColumns
    ) -> None:
        """Raise GroupFailed if a frozen model's log-probs of a group aren't finite: a retry would give the same."""
        if not all((group.group_id, index) in prepared for index in range(len(group.lengths))):
            return  # it was closed meanwhile
        trained = group.columns[LOSS_MASK] != 0
        for role, names in COLUMNS_OF.items():
            for name in (name for name in names if name in columns):
                if wrong := int(np.count_nonzero(~np.isfinite(columns[name][trained]))):
                    raise GroupFailed(
                        DropReason.NO_LOGPROBS,
                        f"the {role} gives {wrong} of its {int(trained.sum())} trained tokens a log-prob that isn't "
                        "finite",
                    )

    def advantages(self, group: TrainGroup) -> tuple[NDArray[np.float32], bool]:
        """Return a group's advantages, and True if the algorithm filters the group.

        A filtered group's advantages are 0, and it keeps its place in the step. If one of the trainer's log-probs isn't
        finite, as with broken weights, all advantages are NaN, so that the update is skipped.
        """
        columns, mask = group.columns, group.columns[LOSS_MASK]
        needed = [columns[name] for name in self._algorithm.needs.advantages if name in self._computed]
        if not all(np.isfinite(values[mask != 0]).all() for values in needed):
            return np.full(mask.size, np.nan, np.float32), False
        found = advantages_of(self._algorithm, columns["reward"], group.sample_lengths, columns)
        if isinstance(found, Filtered):
            logger.info("group %s is in the step, but the algorithm filters it: its advantages are 0", group.group_id)
            return np.zeros(mask.size, np.float32), True
        return found.values, False

    def _valued(self, group: TrainGroup, *, filtered: bool) -> AdvantagesAndReturns:
        """Return a group's advantages and the critic's targets. A filtered group's targets are its values."""
        advantages, values = group.columns[ADVANTAGES], group.columns[VALUES]
        if filtered:
            return AdvantagesAndReturns(advantages, values)
        mask, lengths = group.columns[LOSS_MASK], group.sample_lengths
        return returns_of(self._algorithm, ValuedGroup(advantages, values, mask, lengths))

    def recorded(self, group_id: str, file: StepFile) -> TrainGroup:
        """Return a group of a step file, with its prepared columns. These aren't checked for NaN."""
        columns = file.groups[group_id]
        if missing := [name for name in self._prepared if name not in columns]:
            raise StepFileError(f"the file of step {file.plan.step} has no column {missing[0]} of group {group_id}")
        group = check_group(group_id, columns, [name for name in self.columns if name not in self._prepared])
        return group.with_columns({name: columns[name] for name in self._prepared})

    def _packed(
        self,
        micro_batch: MicroBatchSlices,
        groups: Mapping[str, TrainGroup],
        columns: Sequence[str],
        prompt: str = "prompt_tokens",
    ) -> PackedMicroBatch:
        sequences = list(self._sequences(micro_batch, groups, columns, prompt))
        return pack(sequences) if sequences else empty_micro_batch(name for name in columns if name != ROUTED_EXPERTS)

    def _sequences(
        self, micro_batch: MicroBatchSlices, groups: Mapping[str, TrainGroup], columns: Sequence[str], prompt: str
    ) -> Iterator[TrainSequence]:
        # Old log-probs come from the weights at the step's beginning, even after updates.
        learner = self._learner
        version = learner.step if OLD_LOGPROBS in self._computed else learner.weights_version
        for piece in micro_batch:
            if piece.group_id in groups:
                yield from groups[piece.group_id].sequences(
                    piece.sequences,
                    columns,
                    self._algorithm,
                    self._temperature,
                    version,
                    prompt=prompt,
                    media=self._media,
                )

    def _missing(self, name: str, tokens: int) -> NDArray[Any]:
        """Return a placeholder column for tokens that no forward pass has scored: NaN, -1, or no experts."""
        if name == ROUTED_EXPERTS and (routing := self._learner.routing) is not None:
            return np.zeros((0, routing.layers, routing.top_k), np.uint8)
        spec = COLUMNS[name]
        shape = (tokens, self._candidates) if spec.shape == "T, k" else (tokens,)
        return np.full(shape, np.nan if spec.kinds == "f" else -1, spec.dtype)


def _is_asked(config: RunConfig, role: str, name: str, group: TrainGroup) -> bool:
    """Return True if the group's log-probs come from the role's model `name`."""
    return model_of(config, role, group.columns) == name


def _routed(learner: Learner, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
    both = zip(*learner.log_probs_and_experts(micro_batches), strict=True)
    return [{OLD_LOGPROBS: logprobs, ROUTED_EXPERTS: experts} for logprobs, experts in both]


def _named(
    name: str,
    compute: Callable[[Sequence[PackedMicroBatch]], list[NDArray[np.float32]]],
    micro_batches: Sequence[PackedMicroBatch],
) -> list[dict[str, NDArray[Any]]]:
    return [{name: row} for row in compute(micro_batches)]


def _whitened(batch: PackedMicroBatch, whitening: Whitening) -> PackedMicroBatch:
    """Return a micro-batch with normalised advantages."""
    advantages = whitening.apply(batch.columns["advantages"], batch.loss_mask)
    return replace(batch, columns={**batch.columns, "advantages": advantages})
