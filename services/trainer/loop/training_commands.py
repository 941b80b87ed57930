"""Training commands, which rank 0 calls on all ranks."""

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
"""Maximum number of groups read in one call. Redis holds the whole answer in memory."""


@dataclass
class TrainingRank(CommandedRank):
    """State of a rank that trains the policy: learner, channels, and groups of the open step."""

    learner: Learner
    """Model and optimizer."""
    runner: RoundRunner
    """Runs rounds on the learner."""
    sharing: ModelParallelChannel
    """Channel to the ranks of the same data-parallel index, which work on the same groups."""
    profiler: StepProfiler
    """Profiler of this rank's steps."""
    groups: dict[str, TrainGroup] = field(default_factory=dict)
    """Groups of the open step by id: all on rank 0; on other ranks, the groups that their micro-batches need."""
    shared: set[str] = field(default_factory=set)
    """Ids of the groups that all ranks of this data-parallel index hold."""
    prepared: PreparedColumns = field(default_factory=dict)
    """On rank 0: columns of the open step, computed by forward passes on all ranks."""

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
        """Return columns by group id, from memory or the board. Closed groups are left out."""
        found = {one.group_id: self.groups[one.group_id].columns for one in deliveries if one.group_id in self.groups}
        names, absent = self.board.needs(TRAIN), [one for one in deliveries if one.group_id not in found]
        for delivery, columns in zip(absent, self._load(absent, names, deadline), strict=True):
            if columns is not None:
                found[delivery.group_id] = check_group(delivery.group_id, columns, names).columns
        return found

    def _load(
        self, deliveries: Sequence[Delivery], names: Sequence[str], deadline: float
    ) -> list[dict[str, Column] | None]:
        """Load groups' columns from the board. Retry until `deadline` while the board is unavailable."""
        while True:
            try:
                return self.board.load(deliveries, names)
            except BoardUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(TICK_SECONDS)  # brief: half of the ranks' timeout

    def forget_step(self) -> None:
        """Remove the open step's groups and prepared columns from memory."""
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
    """Load the groups that this rank lacks; run a round's forward and backward passes.

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
    """Compute columns of a round's groups by forward passes; gather the columns on rank 0."""
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
    """Bring some of a step's groups, with prepared columns, to the ranks that train on these groups.

    Once all groups of a step are assembled, no update depends on the board. The command may be repeated.

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
    """Run the optimizer. `normalizer` divides the summed loss of the accumulated micro-batches."""
    return rank.learner.update(normalizer)


@command
def keep_weights(rank: TrainingRank) -> None:
    """Copy the current weights. Broadcasts send this copy until the step ends."""
    rank.learner.keep_weights()


@command
def end_step(rank: TrainingRank, refreshed: Collection[str] = ()) -> int:
    """End a step after its updates, and forget its groups. Return the checksum of the new weights.

    `refreshed`: `StepPlan.refreshed`.
    """
    rank.learner.end_step(refreshed)
    rank.forget_step()
    return rank.checksum()


@command
def discard(rank: TrainingRank) -> None:
    """Discard the open step: its gradients and its groups in memory."""
    rank.learner.discard()
    rank.forget_step()


@command
def replay(rank: TrainingRank, step: int, plan: Mapping[str, Any]) -> tuple[list[UpdateStats], int]:
    """Train a committed step again from its step file.

    `plan`: the step's plan in the ledger. Return the statistics of the step's updates and the checksum of the new
    weights. Raises StepFileError.
    """
    with rank.channel.disk.all_ranks(f"reading the file of step {step}") as progress:
        file = read_committed(rank.run_folder, step, plan, progress)
    return rank.runner.replay(file, plan.get(OUTCOME)), rank.checksum()


@command
def export(rank: TrainingRank, folder: Path) -> int | DiskRefused:
    """Write the weights to a folder in Hugging Face's format.

    Return the version of the weights, or the reason why they can't be written.
    """
    try:
        rank.learner.save_hf(folder)
    except DiskRefused as error:
        return error
    return rank.learner.step


@command
def offload_state(rank: TrainingRank, *, to_host: bool) -> tuple[int, int]:
    """Move the training state from the devices to the host's memory, or back. Return the bytes in use on all devices
    before and after."""
    before, after = rank.learner.offload() if to_host else rank.learner.onload()
    return rank.channel.sum_over_ranks(before), rank.channel.sum_over_ranks(after)


@command
def begin_profile(rank: TrainingRank, step: int, options: ProfileOptions) -> None:
    """Start profiling a step on the ranks that the options name."""
    rank.profiler.begin(step, options)


@command
def end_profile(rank: TrainingRank) -> None:
    """Stop profiling a step, and write each rank's files. All ranks wait for the last."""
    with rank.channel.disk.all_ranks("writing profiles"):
        rank.profiler.end()
