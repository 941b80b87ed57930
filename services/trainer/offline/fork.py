"""Train a run's recorded steps again under other settings, without generating; `relaxd fork` starts this program.

It loads the weights of the run after a step, and trains the steps after it from their files. The fork's folder has the
settings (config.json) and, if the reward is another one, the new rewards (`relaxd.run_folder.REWARDS`). Like a replay
it has the run's parallel layout and starts its ranks itself.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxd.algorithms import AlgorithmError, create
from relaxd.algorithms.advantage_terms import Whitening
from relaxd.board import ADVANTAGES, LOSS_MASK, stages_for
from relaxd.config import RunConfig
from relaxd.process.ports import NoFreePort
from relaxd.run_folder import METRICS, REWARDS, append_lines, checkpoint_steps, read_lines
from services.trainer.batch.groups import MalformedGroup, TrainGroup, check_group
from services.trainer.batch.micro_batch_division import mini_batch
from services.trainer.batch.step_plan import StepFile, StepFileError, StepPlan, read_step_file
from services.trainer.offline.program_parts import (
    OfflineError,
    newest_intact,
    print_error,
    print_result,
    read_config,
    start_ranks,
)
from services.trainer.offline.replay import learner_at, skipped_updates, step_files

if TYPE_CHECKING:
    from services.trainer.loop.round_runner import PreparedColumns, RoundRunner
    from services.trainer.megatron.world import World

MODULE = "services.trainer.offline.fork"


def fork(run_folder: Path, out: Path, start: int, last: int) -> dict[str, Any] | None:
    """Train the steps after `start` up to `last` on this rank, under the settings in `out`.

    Rank 0 appends a line for each step to metrics.jsonl in `out`, and returns the number of steps.

    Raises:
        OfflineError, StepFileError: a step file is missing or damaged, or lacks what these settings need.
        CheckpointError: the checkpoint doesn't fit the model and the settings.
    """
    # Imported here, so that bad arguments are refused at once: loading Megatron takes seconds.
    from services.trainer.loop.round_runner import RoundRunner
    from services.trainer.loop.step_metrics import metrics_of_step

    config = read_config(out)
    rewards = {line.pop("group"): {**line, "reward": np.array(line["reward"])} for line in read_lines(out / REWARDS)}
    changed = config != read_config(run_folder)
    learner, channel = learner_at(config, run_folder, start)
    steps = ForkedSteps(RoundRunner(learner, config), learner.world, config, rewards)
    skipped = {} if changed else skipped_updates(run_folder)
    for number, path in step_files(run_folder, last, start).items():
        with channel.disk.all_ranks(f"reading {path}") as progress:
            file = read_step_file(path, progress)
        began = time.monotonic()
        if changed:
            plan, groups = steps.prepare(file)
        else:  # the recorded columns: computed anew, in other micro-batches, they could differ in the last bit
            plan = file.plan
            groups = {group_id: steps.runner.recorded(group_id, file) for group_id in plan.groups}
        updates = steps.runner.train(plan, groups, skipped.get(number))
        metrics = metrics_of_step(plan, list(groups.values()), updates, learner)
        metrics |= {
            "train_seconds": time.monotonic() - began,
            "weights_checksum": float(channel.sum_over_ranks(learner.checksum())),
        }
        if learner.world.rank == 0:
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            append_lines(out / METRICS, json.dumps({"step": number, **finite}) + "\n")
            numbers = f"loss {metrics['loss']:.6g}, gradient norm {metrics['grad_norm']:.6g}"
            print(f"step {number} of {last}: {numbers}", file=sys.stderr)
    return {"steps": last - start} if learner.world.rank == 0 else None


class ForkedSteps:
    """Prepares a run's recorded steps for training under the fork's settings."""

    def __init__(
        self, runner: "RoundRunner", world: "World", config: RunConfig, rewards: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """`rewards`: columns with new rewards, by group id."""
        self.runner = runner
        self._world = world
        self._config = config
        self._algorithm = create(config.algorithm)
        self._rewards = rewards
        # Advantages of turns or players depend on columns that aren't recorded, so they stay unchanged.
        self._makes_advantages = ADVANTAGES in self.runner.columns and config.agent.credit == "sample"

    def prepare(self, file: StepFile) -> tuple[StepPlan, dict[str, TrainGroup]]:
        """Return a recorded step's plan and groups, recomputed under the fork's settings. Collective.

        The division into micro-batches stays. Values that depend on rewards and weights are computed again: advantages,
        prepared columns and the loss's divisors. A group that the algorithm filters has advantages of 0.

        Raises OfflineError: the fork needs a column that wasn't recorded, or an algorithm fails on a group.
        """
        from services.trainer.loop.round_runner import GroupFailed

        plan = file.plan
        try:
            groups = {group_id: self._group(group_id, file) for group_id in plan.groups}
            prepared = self._prepared(plan, groups)
            groups = {
                group_id: group.with_columns(self.runner.prepared_columns(group, prepared))
                for group_id, group in groups.items()
            }
        except (AlgorithmError, GroupFailed, MalformedGroup) as error:
            raise OfflineError(f"step {plan.step} can't be trained under these settings: {error}") from error
        every = groups.values()
        whitening = None
        if self._algorithm.needs.whitened:
            whitening = Whitening.of(
                [one.columns[ADVANTAGES] for one in every], [one.columns[LOSS_MASK] for one in every]
            )
        mini_batches = tuple(
            mini_batch([groups[group_id] for group_id in plan.groups_of(one)], one.rounds, self._algorithm)
            for one in plan.mini_batches
        )
        epochs = self._config.trainer.epochs
        return replace(plan, mini_batches=mini_batches, epochs=epochs, whitening=whitening), groups

    def _group(self, group_id: str, file: StepFile) -> TrainGroup:
        """Return a recorded group with the fork's rewards. Recompute its advantages if that needs no forward pass."""
        columns = {**file.groups[group_id], **self._rewards.get(group_id, {})}
        names = [name for name in self.runner.columns if name != ADVANTAGES or not self._makes_advantages]
        if missing := [name for name in names if name not in columns]:
            raise OfflineError(
                f"the file of step {file.plan.step} has no column {missing[0]}, which these settings need "
                f"(algorithm.name = {self._config.algorithm.name!r}): it was not recorded"
            )
        group = check_group(group_id, columns, names)
        return group.with_columns({ADVANTAGES: self.runner.advantages(group)[0]}) if self._makes_advantages else group

    def _prepared(self, plan: StepPlan, groups: Mapping[str, TrainGroup]) -> "PreparedColumns":
        """Run the forward passes of a step. Return the computed columns of all ranks."""
        from services.trainer.megatron.channels import all_gather

        prepared: PreparedColumns = {}
        if not self.runner.prepares:
            return prepared
        for entry in (entry for one in plan.mini_batches for entry in one.rounds):
            for found in self.runner.prepare(entry, groups):
                for columns in all_gather(found if self._world.first_of_replica else {}):
                    prepared |= columns
        return prepared


def print_answers(run_folder: Path, start: int, last: int) -> None:
    """Print the columns that rewards read, as a JSON line for each recorded group. Raises OfflineError."""
    needs = next(stage.needs for stage in stages_for(read_config(run_folder)) if stage.name == "reward")
    for path in step_files(run_folder, last, start).values():
        file = read_step_file(path, names=needs)
        for group_id in file.plan.groups:
            columns = file.groups[group_id]
            if missing := [name for name in needs if name not in columns]:
                raise OfflineError(f"{path} has no column {missing[0]}, which rewards read: it was not recorded")
            shown = {
                name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in columns.items()
            }
            print(json.dumps({"group": group_id, "columns": shown}), flush=True)


def check(run_folder: Path, start: int, last: int) -> None:
    """Raise OfflineError unless the run has an intact checkpoint of step `start` and the files of the steps after."""
    if start and newest_intact(run_folder, start) != start:
        known = ", ".join(str(step) for step in reversed(checkpoint_steps(run_folder))) or "none"
        raise OfflineError(
            f"{run_folder} has no intact checkpoint of step {start}: a fork begins at step 0, the initial model, or at "
            f"one of these checkpoints: {known}"
        )
    step_files(run_folder, last, start)


def main() -> int:
    """Run the fork with the command line's arguments. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--start", type=int, required=True, help="step after which the weights are taken")
    parser.add_argument("--last", type=int, required=True, help="last step to train")
    parser.add_argument("--out", type=Path, help="the fork's folder; without one, print the recorded answers")
    given = parser.parse_args()
    folder, start, last = given.run_folder, given.start, given.last
    try:
        if "RANK" not in os.environ:
            check(folder, start, last)
            if given.out is None:
                print_answers(folder, start, last)
                return 0
            if (config := read_config(given.out)).trainer.ranks > 1:
                return start_ranks(MODULE, config, sys.argv[1:])
    except (OfflineError, StepFileError, NoFreePort) as error:
        return print_error(error)
    return print_result(lambda: fork(folder, given.out, start, last))


if __name__ == "__main__":
    sys.exit(main())
