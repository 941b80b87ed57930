"""Training commands, which the ranks execute together."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from relaxd.algorithms.advantage_terms import Whitening
from relaxd.board import TRAIN, BoardUnavailable, Column, Delivery
from services.trainer.batch.groups import TrainGroup, check_group
from services.trainer.batch.step_file import read_committed
from services.trainer.batch.step_plan import OUTCOME, MicroBatchRound
from services.trainer.learner.learner import Learner
from services.trainer.learner.update import UpdateStats
from services.trainer.loop.commanded_rank import CommandedRank
from services.trainer.loop.round_runner import PreparedColumns, RoundRunner
from services.trainer.loop.step_profiler import ProfileOptions, StepProfiler
from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.channels import ModelParallelChannel
from services.trainer.megatron.disk_work import DiskRefused
from services.trainer.megatron.rank_messages import message

message(Delivery)
message(Whitening)

LOADED_TOGETHER = 8
"""Number of groups in one call to Redis, which holds the answer in memory until it is sent."""


@dataclass
class TrainingRank(CommandedRank):
    """The state of a rank that trains the policy."""

    learner: Learner
    """Model and optimizer."""
    runner: RoundRunner
    """Runs rounds on the learner."""
    sharing: ModelParallelChannel
    """The channel to the ranks that work on the same groups."""
    profiler: StepProfiler
    """Records steps of this rank."""
    groups: dict[str, TrainGroup] = field(default_factory=dict)
    """Groups of the open step by id: all on rank 0, on other ranks those that their micro-batches need."""
    shared: set[str] = field(default_factory=set)
    """Groups held by all ranks of this data-parallel index, the same on each of them."""
    prepared: PreparedColumns = field(default_factory=dict)
    """Rank 0: columns of the open step that forward passes on any rank have computed."""

    def load_missing(self, needed: set[str], deliveries: Collection[Delivery]) -> None:
        """Get those of the needed groups that aren't in `groups`, except those that were closed meanwhile.

        Rank 0 discards the step if there are any of these. One rank of each data-parallel index reads what it lacks
        from the board and shares it with the others; they call this together, with the same arguments.

        Args:
            needed: ids of groups.
            deliveries: one of each that isn't shared yet.
        """
        deadline = time.monotonic() + self.channel.timeout_seconds / 2
        rest = [one for one in deliveries if one.group_id in needed and one.group_id not in self.shared]
        while rest:
            some, rest = rest[:LOADED_TOGETHER], rest[LOADED_TOGETHER:]
            for group_id, columns in self.sharing.share(partial(self._columns, some, deadline)).items():
                self.groups.setdefault(group_id, TrainGroup(group_id, columns))
                self.shared.add(group_id)

    def _columns(self, deliveries: Sequence[Delivery], deadline: float) -> dict[str, Mapping[str, Any]]:
        """Return the columns of groups by id, without groups that were closed."""
        found = {one.group_id: self.groups[one.group_id].columns for one in deliveries if one.group_id in self.groups}
        names, absent = self.board.needs(TRAIN), [one for one in deliveries if one.group_id not in found]
        for delivery, columns in zip(absent, self._load(absent, names, deadline), strict=True):
            if columns is not None:
                found[delivery.group_id] = check_group(delivery.group_id, columns, names).columns
        return found

    def _load(
        self, deliveries: Sequence[Delivery], names: Sequence[str], deadline: float
    ) -> list[dict[str, Column] | None]:
        """Load columns from the board, which may be unavailable until `deadline`."""
        while True:
            try:
                return self.board.load(deliveries, names)
            except BoardUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(TICK_SECONDS)  # brief: half of the ranks' timeout

    def forget_step(self) -> None:
        """Forget the open step's groups."""
        self.groups.clear()
        self.shared.clear()
        self.prepared.clear()


@message
@dataclass(frozen=True)
class Round:
    """Run forward and backward of a round."""

    micro_batches: MicroBatchRound
    deliveries: tuple[Delivery, ...]
    """Deliveries of its groups."""
    whitening: Whitening | None = None
    """`StepPlan.whitening`."""
    last: bool = False
    """True for the last round of its update."""

    def execute(self, rank: TrainingRank) -> None:
        """Get this rank's missing groups and accumulate gradients."""
        rank.load_missing(rank.runner.own_groups(self.micro_batches), self.deliveries)
        rank.runner.run(self.micro_batches, rank.groups, self.whitening, last=self.last)


@message
@dataclass(frozen=True)
class Prepare:
    """Compute columns of a round's groups by forward passes, before the step's first update."""

    micro_batches: MicroBatchRound
    deliveries: tuple[Delivery, ...]
    """Deliveries of its groups."""

    def execute(self, rank: TrainingRank) -> None:
        """Get this rank's missing groups, compute its part of the columns, and pass them to rank 0."""
        rank.load_missing(rank.runner.own_groups(self.micro_batches), self.deliveries)
        own = rank.runner.prepare(self.micro_batches, rank.groups)
        world = rank.learner.world
        first = world.tp_rank == world.cp_rank == world.pp_rank == 0  # the others have computed the same
        # One micro-batch at a time: those of a pipeline's schedule may have gigabytes.
        for found in own:
            for columns in rank.channel.gather(found if first else {}):
                rank.prepared |= columns


@message
@dataclass(frozen=True)
class Assemble:
    """Have some of a step's groups, with their prepared columns, on the ranks that train on them.

    Once all groups of a step are assembled, no update depends on the board. Repeating it does no harm.
    """

    deliveries: tuple[Delivery, ...]
    """Deliveries of the groups."""
    columns: Mapping[str, Mapping[str, NDArray[Any]]]
    """The prepared columns of each group."""
    dp_ranks: Mapping[str, frozenset[int]]
    """The data-parallel ranks that train on each group."""

    def execute(self, rank: TrainingRank) -> bool:
        """Return whether all ranks have their groups; if not, some were closed."""
        world = rank.learner.world
        needed = {group_id for group_id, dp_ranks in self.dp_ranks.items() if world.dp_rank in dp_ranks}
        rank.load_missing(needed, self.deliveries)
        kept = self.columns.keys() if world.rank == 0 else needed  # rank 0 writes all of them to the step file
        for group_id, columns in self.columns.items():
            group = rank.groups.pop(group_id, None)
            if group is not None and group_id in kept:
                rank.groups[group_id] = group.with_columns(columns)
        rank.shared -= self.columns.keys() - needed
        return rank.channel.all_ranks_agree(needed <= rank.groups.keys())


@message
@dataclass(frozen=True)
class Update:
    """Update the weights; `normalizer` divides the summed loss of the accumulated micro-batches."""

    normalizer: float

    def execute(self, rank: TrainingRank) -> UpdateStats:
        """Return the update's statistics."""
        return rank.learner.update(self.normalizer)


@message
@dataclass(frozen=True)
class KeepWeights:
    """Have broadcasts send the weights as they are now until the step ends."""

    def execute(self, rank: TrainingRank) -> None:
        """Copy them."""
        rank.learner.keep_weights()


@message
@dataclass(frozen=True)
class EndStep:
    """Count a step whose updates are done, and forget its groups."""

    refreshed: tuple[str, ...] = ()
    """`StepPlan.refreshed`."""

    def execute(self, rank: TrainingRank) -> int:
        """Return the checksum of the new weights."""
        rank.learner.end_step(self.refreshed)
        rank.forget_step()
        return rank.checksum()


@message
@dataclass(frozen=True)
class Discard:
    """Drop the open step's gradients and groups."""

    def execute(self, rank: TrainingRank) -> None:
        """Drop the gradients and groups."""
        rank.learner.discard()
        rank.forget_step()


@message
@dataclass(frozen=True)
class Replay:
    """Repeat a committed step from its file."""

    step: int
    plan: Mapping[str, Any]
    """The step's plan in the ledger."""

    def execute(self, rank: TrainingRank) -> tuple[list[UpdateStats], int]:
        """Return the statistics of the step's updates and the checksum of the new weights. Raises StepFileError."""
        with rank.channel.disk.all_ranks(f"reading the file of step {self.step}") as progress:
            file = read_committed(rank.run_folder, self.step, self.plan, progress)
        updates = rank.runner.replay(file, self.plan.get(OUTCOME))
        return updates, rank.checksum()


@message
@dataclass(frozen=True)
class Export:
    """Write the weights as a Hugging Face folder."""

    folder: Path

    def execute(self, rank: TrainingRank) -> int | DiskRefused:
        """Return the version of the weights, or the reason why they can't be written."""
        try:
            rank.learner.save_hf(self.folder)
        except DiskRefused as error:
            return error
        return rank.learner.step


@message
@dataclass(frozen=True)
class OffloadState:
    """Move the state from the devices to the host's memory, or back."""

    to_host: bool

    def execute(self, rank: TrainingRank) -> tuple[int, int]:
        """Return the bytes in use on all devices before and after."""
        before, after = rank.learner.offload() if self.to_host else rank.learner.onload()
        return rank.channel.sum_over_ranks(before), rank.channel.sum_over_ranks(after)


@message
@dataclass(frozen=True)
class BeginProfile:
    """Start recording a step."""

    step: int
    options: ProfileOptions

    def execute(self, rank: TrainingRank) -> None:
        """Start recording, if the options name this rank."""
        rank.profiler.begin(self.step, self.options)


@message
@dataclass(frozen=True)
class EndProfile:
    """End the recording of a step."""

    def execute(self, rank: TrainingRank) -> None:
        """Write this rank's files while the other ranks wait."""
        with rank.channel.disk.all_ranks("writing profiles"):
            rank.profiler.end()
