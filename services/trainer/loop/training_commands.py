"""Training commands, which the ranks call together."""

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
from services.trainer.batch.step_plan import OUTCOME, MicroBatchRound, read_committed
from services.trainer.learner.learner import Learner
from services.trainer.learner.update import UpdateStats
from services.trainer.loop.commanded_rank import CommandedRank
from services.trainer.loop.round_runner import PreparedColumns, RoundRunner
from services.trainer.loop.step_profiler import ProfileOptions, StepProfiler
from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.channels import ModelParallelChannel
from services.trainer.megatron.disk_work import DiskRefused
from services.trainer.megatron.rank_messages import command, message

message(Delivery)
message(Whitening)

LOADED_TOGETHER = 8
"""Maximum number of groups in one call to Redis, which holds the answer in memory until it is sent."""


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
    """Groups of the open step by id: all on rank 0; on other ranks, the groups that their micro-batches need."""
    shared: set[str] = field(default_factory=set)
    """Groups held by all ranks of this data-parallel index, the same on each of them."""
    prepared: PreparedColumns = field(default_factory=dict)
    """Rank 0: columns of the open step that forward passes on any rank have computed."""

    def load_missing(self, needed: set[str], deliveries: Collection[Delivery]) -> None:
        """Load the needed groups that aren't in `groups` yet, except groups that were closed meanwhile.

        If any were closed, rank 0 discards the step. One rank of each data-parallel index reads missing groups from the
        board and shares them with the others; they call this together, with the same arguments.

        Args:
            needed: ids of groups.
            deliveries: a delivery of each needed group that isn't shared yet.
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
        """Load columns from the board; retry until `deadline` while the board is unavailable."""
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


@command
def train_round(
    rank: TrainingRank,
    entry: MicroBatchRound,
    deliveries: Collection[Delivery],
    whitening: Whitening | None = None,
    *,
    last: bool = False,
) -> None:
    """Get this rank's missing groups, and run forward and backward of a round.

    Args:
        rank: this rank.
        entry: the round.
        deliveries: deliveries of the round's groups.
        whitening: `StepPlan.whitening`.
        last: whether it is the last round of its update.
    """
    rank.load_missing(rank.runner.own_groups(entry), deliveries)
    rank.runner.run(entry, rank.groups, whitening, last=last)


@command
def prepare(rank: TrainingRank, entry: MicroBatchRound, deliveries: Collection[Delivery]) -> None:
    """Compute columns of a round's groups by forward passes, before the step's first update. Pass them to rank 0."""
    rank.load_missing(rank.runner.own_groups(entry), deliveries)
    own = rank.runner.prepare(entry, rank.groups)
    # Gather one micro-batch at a time: the columns of a whole round may take gigabytes.
    for found in own:
        for columns in rank.channel.gather(found if rank.learner.world.first_of_replica else {}):
            rank.prepared |= columns


@command
def assemble(
    rank: TrainingRank,
    deliveries: Collection[Delivery],
    columns: Mapping[str, Mapping[str, NDArray[Any]]],
    dp_ranks: Mapping[str, frozenset[int]],
) -> bool:
    """Bring some of a step's groups, with their prepared columns, to the ranks that train on them.

    Once all groups of a step are assembled, no update depends on the board. Repeating it does no harm.

    Args:
        rank: this rank.
        deliveries: deliveries of the groups.
        columns: the prepared columns of each group.
        dp_ranks: the data-parallel ranks that train on each group.

    Returns:
        True if all ranks have their groups; False if some groups were closed.
    """
    world = rank.learner.world
    needed = {group_id for group_id, ranks in dp_ranks.items() if world.dp_rank in ranks}
    rank.load_missing(needed, deliveries)
    kept = columns.keys() if world.rank == 0 else needed  # rank 0 writes all of them to the step file
    for group_id, prepared in columns.items():
        group = rank.groups.pop(group_id, None)
        if group is not None and group_id in kept:
            rank.groups[group_id] = group.with_columns(prepared)
    rank.shared -= columns.keys() - needed
    return rank.channel.all_ranks_agree(needed <= rank.groups.keys())


@command
def update(rank: TrainingRank, normalizer: float) -> UpdateStats:
    """Update the weights; `normalizer` divides the summed loss of the accumulated micro-batches."""
    return rank.learner.update(normalizer)


@command
def keep_weights(rank: TrainingRank) -> None:
    """Until the step ends, have broadcasts send a copy of the current weights."""
    rank.learner.keep_weights()


@command
def end_step(rank: TrainingRank, refreshed: Collection[str] = ()) -> int:
    """End a step whose updates are done, and forget its groups. Return the checksum of the new weights.

    `refreshed`: `StepPlan.refreshed`.
    """
    rank.learner.end_step(refreshed)
    rank.forget_step()
    return rank.checksum()


@command
def discard(rank: TrainingRank) -> None:
    """Drop the open step's gradients and groups."""
    rank.learner.discard()
    rank.forget_step()


@command
def replay(rank: TrainingRank, step: int, plan: Mapping[str, Any]) -> tuple[list[UpdateStats], int]:
    """Repeat a committed step from its file.

    `plan`: the step's plan in the ledger. Return the statistics of the step's updates and the checksum of the new
    weights. Raises StepFileError.
    """
    with rank.channel.disk.all_ranks(f"reading the file of step {step}") as progress:
        file = read_committed(rank.run_folder, step, plan, progress)
    return rank.runner.replay(file, plan.get(OUTCOME)), rank.checksum()


@command
def export(rank: TrainingRank, folder: Path) -> int | DiskRefused:
    """Write the weights as a Hugging Face folder.

    Return the version of the weights, or the reason why they can't be written.
    """
    try:
        rank.learner.save_hf(folder)
    except DiskRefused as error:
        return error
    return rank.learner.step


@command
def offload_state(rank: TrainingRank, *, to_host: bool) -> tuple[int, int]:
    """Move the state from the devices to the host's memory, or back. Return the bytes in use on all devices before and
    after."""
    before, after = rank.learner.offload() if to_host else rank.learner.onload()
    return rank.channel.sum_over_ranks(before), rank.channel.sum_over_ranks(after)


@command
def begin_profile(rank: TrainingRank, step: int, options: ProfileOptions) -> None:
    """Start recording a step, if the options name this rank."""
    rank.profiler.begin(step, options)


@command
def end_profile(rank: TrainingRank) -> None:
    """End the recording of a step: write this rank's files while the other ranks wait."""
    with rank.channel.disk.all_ranks("writing profiles"):
        rank.profiler.end()
