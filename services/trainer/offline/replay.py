"""Replay a recorded step, without services; `relaxd replay` starts this program.

It loads the nearest intact checkpoint before the step (or the initial model), replays the steps from their files, and
compares the results with the recorded ones. It has the run's parallel layout and starts its ranks itself.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaxd.config import RunConfig
from relaxd.process.ports import NoFreePort
from relaxd.run_folder import LEDGER, METRICS, checkpoint_path, read_lines
from services.trainer.batch.step_plan import OUTCOME, read_step_file, step_file_path
from services.trainer.loop.checkpoint_folders import read_state
from services.trainer.offline.program_parts import (
    OfflineError,
    newest_intact,
    print_error,
    print_result,
    read_config,
    start_ranks,
)

if TYPE_CHECKING:
    from services.trainer.learner.learner import Learner
    from services.trainer.megatron.channels import RankChannel

MODULE = "services.trainer.offline.replay"
COMPARED = ("loss", "grad_norm", "lr", "weights_checksum")


def replay(run_folder: Path, step: int, start: int) -> dict[str, Any] | None:
    """Replay a step on this rank. Returns the comparison on rank 0.

    Args:
        run_folder: the run's folder.
        step: the step.
        start: the step of an intact checkpoint to load; 0 for the initial model.

    Raises:
        OfflineError, StepFileError: a step file is missing or damaged.
        CheckpointError: the checkpoint doesn't fit the model.
    """
    # Imported here, so that bad arguments are refused at once: loading Megatron takes seconds.
    from services.trainer.learner.update import step_metrics
    from services.trainer.loop.round_runner import RoundRunner

    config = read_config(run_folder)
    learner, channel = learner_at(config, run_folder, start)
    runner = RoundRunner(learner, config)
    skipped = skipped_updates(run_folder)
    for number, file in step_files(run_folder, step, start).items():
        with channel.disk.all_ranks(f"reading {file}") as progress:
            recorded_step = read_step_file(file, progress)
        found = step_metrics(runner.replay(recorded_step, skipped.get(number)), recorded_step.plan.epochs)
        if learner.world.rank == 0:
            numbers = f"loss {found['loss']:.6g}, gradient norm {found['grad_norm']:.6g}"
            print(f"step {number}: {numbers}", file=sys.stderr)
    checksum = channel.sum_over_ranks(learner.checksum())
    if learner.world.rank != 0:
        return None
    found |= {"weights_checksum": float(checksum), "optimizer_steps": float(learner.optimizer_steps)}
    recorded = recorded_metrics(run_folder, step)
    return {
        "step": step,
        "start": f"the checkpoint of step {start}" if start else "the initial model",
        "numbers": {name: {"recorded": recorded.get(name), "replayed": found[name]} for name in COMPARED},
    }


def learner_at(config: RunConfig, run_folder: Path, start: int) -> tuple["Learner", "RankChannel"]:
    """Return this rank's learner, with the weights of a run after step `start`, and its channel to the other ranks.

    Raises CheckpointError: the checkpoint doesn't fit the model.
    """
    from services.trainer.learner.learner import Learner
    from services.trainer.loop.checkpoint_control import same_layout
    from services.trainer.megatron.channels import RankChannel

    learner = Learner.of_run(config)
    channel = RankChannel(config.trainer.collective_timeout_seconds, learner.world.disk)
    if start:
        path = checkpoint_path(run_folder, start)
        learner.restore(path, start, same_layout=same_layout(read_state(path), config))
    return learner, channel


def step_files(run_folder: Path, step: int, start: int) -> dict[int, Path]:
    """Return the paths of the step files after `start` up to `step`, by step. Raises OfflineError if one is missing."""
    files = {number: step_file_path(run_folder, number) for number in range(start + 1, step + 1)}
    for file in files.values():
        if not file.is_file():
            raise OfflineError(
                f"{file} is missing, which step {step} needs: it was removed once checkpoints covered it "
                '(trainer.checkpoint.keep_step_files = "always" keeps all)'
            )
    return files


def recorded_metrics(run_folder: Path, step: int) -> dict[str, Any]:
    """Return the recorded metrics of a step: its line of metrics.jsonl, or {}."""
    return next((line for line in read_lines(run_folder / METRICS) if line.get("step") == step), {})


def skipped_updates(run_folder: Path) -> dict[int, list[int]]:
    """Return the indices of the updates that steps of ledger.jsonl skipped, by step."""
    lines = read_lines(run_folder / LEDGER)
    return {line["step"]: line["plan"][OUTCOME] for line in lines if OUTCOME in line["plan"]}


def main() -> int:
    """Run the replay with the command line's arguments. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--start", type=int, help="step of the checkpoint to start from; default: the newest intact")
    given = parser.parse_args()
    start = given.start
    if start is None:  # once, not on every rank, because it reads the whole checkpoint
        start = newest_intact(given.run_folder, given.step - 1) or 0
    if "RANK" not in os.environ:
        try:
            config = read_config(given.run_folder)
            step_files(given.run_folder, given.step, start)
            if config.trainer.ranks > 1:
                return start_ranks(MODULE, config, [*sys.argv[1:], "--start", str(start)])
        except (OfflineError, NoFreePort) as error:
            return print_error(error)
    return print_result(lambda: replay(given.run_folder, given.step, start))


if __name__ == "__main__":
    sys.exit(main())
