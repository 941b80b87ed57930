"""Shared parts of the offline programs: a run's configuration, its checkpoints, their ranks and output."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relaxd.config import RunConfig
from relaxd.models import DataError
from relaxd.process.ports import reserve_port
from relaxd.replica.gpus import visible_gpus
from relaxd.run_folder import checkpoint_path, checkpoint_steps
from services.trainer.batch.step_plan import StepFileError
from services.trainer.loop.checkpoint_folders import CheckpointBroken, verify

logger = logging.getLogger(__name__)

POLL_SECONDS, RANK0_ERROR_SECONDS = 0.1, 5.0
"""Seconds between checks of rank processes; maximum seconds to wait for rank 0's error after another rank failed."""


class OfflineError(Exception):
    """The requested operation isn't possible on this run's folder."""


def read_config(run_folder: Path) -> RunConfig:
    """Read a run's configuration from its folder.

    Raises:
        OfflineError: the folder isn't a run's folder.
    """
    try:
        return RunConfig.model_validate_json((run_folder / "config.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise OfflineError(f"{run_folder} is not the folder of a run: {error}") from error


def newest_intact(run_folder: Path, up_to: int) -> int | None:
    """Return the step of the newest intact checkpoint at or before step `up_to`; None if there is none."""
    for step in checkpoint_steps(run_folder):
        if step <= up_to:
            try:
                verify(checkpoint_path(run_folder, step))
            except CheckpointBroken as error:
                logger.error("%s; trying the previous one", error)
            else:
                return step
    return None


def start_ranks(module: str, config: RunConfig, words: Sequence[str]) -> int:
    """Run a program once per rank on this machine, showing only rank 0's output. Return the exit code.

    When a rank fails, the others are killed, because they would wait for it. Raises OfflineError: this machine has
    GPUs, but fewer than ranks.
    """
    ranks, hosts, gpus = config.trainer.ranks, config.trainer.hosts, len(visible_gpus())
    if 0 < gpus < ranks:
        made = f" on {hosts} hosts" if hosts > 1 else ""
        raise OfflineError(
            f"the run's trainer has {ranks} ranks{made}, which are all started here, and this machine shows {gpus} "
            f"GPUs: do this on a machine with {ranks}"
        )
    port = reserve_port("127.0.0.1", config.weights.port_range)  # until they have ended
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    try:
        while not any(process.poll() for process in processes) and any(process.poll() is None for process in processes):
            time.sleep(POLL_SECONDS)  # idle: its ranks work
        codes = [process.poll() or 0 for process in processes]
        failed = next((f"rank {number} ended with code {code}" for number, code in enumerate(codes) if code), "")
        try:
            processes[0].wait(RANK0_ERROR_SECONDS)  # it may be about to report why another rank failed
        except subprocess.TimeoutExpired:
            print(json.dumps({"error": failed}), flush=True)
        return max(map(abs, codes))
    finally:
        for process in processes:
            process.kill()
        port.close()


def print_result(work: Callable[[], dict[str, Any] | None]) -> int:
    """Run `work` and print its result as a line of JSON, or an expected error as {"error": ...}.

    Returns:
        The exit code.
    """
    # Imported here, so that bad arguments are refused at once: loading Megatron takes seconds.
    from services.trainer.learner.checkpoint_files import CheckpointError
    from services.trainer.megatron.disk_work import DiskRefused, DiskStalled, DiskWorkFailed
    from services.trainer.model.architecture import ModelError, ModelFileError

    of_folder = OfflineError, StepFileError, CheckpointError, CheckpointBroken, ModelError, ModelFileError, DataError
    of_disk = DiskRefused, DiskWorkFailed, DiskStalled, OSError, ValueError
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        result = work()
    except (*of_folder, *of_disk) as error:
        return print_error(error)
    if result is not None:
        print(json.dumps(result), flush=True)
    return 0


def print_error(error: Exception) -> int:
    """Print an error as {"error": ...}, a line of JSON. Returns the exit code."""
    print(json.dumps({"error": str(error)}), flush=True)
    return 1
