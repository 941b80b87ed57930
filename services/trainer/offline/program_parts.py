"""Shared parts of the offline programs: a run's configuration, its checkpoints, the programs' output."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relaxd.config import RunConfig
from relaxd.run_folder import checkpoint_path, checkpoint_steps
from services.trainer.checkpoints.checkpoint_folders import CheckpointBroken, verify

logger = logging.getLogger(__name__)


class OfflineError(Exception):
    """The requested operation isn't possible on this run's folder."""


def read_config(run_folder: Path) -> RunConfig:
    """Read the configuration of a run.

    Raises:
        OfflineError: the folder isn't a run's folder.
    """
    try:
        return RunConfig.model_validate_json((run_folder / "config.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise OfflineError(f"{run_folder} is not the folder of a run: {error}") from error


def newest_intact(run_folder: Path, up_to: int) -> int | None:
    """Return the step of the newest intact checkpoint up to step `up_to`, None without one."""
    for step in checkpoint_steps(run_folder):
        if step <= up_to:
            try:
                verify(checkpoint_path(run_folder, step))
            except CheckpointBroken as error:
                logger.error("%s; trying the previous one", error)
            else:
                return step
    return None


def print_result(work: Callable[[], dict[str, Any] | None], expected: tuple[type[Exception], ...]) -> int:
    """Run `work` and print its result as a line of JSON, or an expected error as {"error": ...}.

    Returns:
        The exit code.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        result = work()
    except expected as error:
        return print_error(error)
    if result is not None:
        print(json.dumps(result), flush=True)
    return 0


def print_error(error: Exception) -> int:
    """Print an error as {"error": ...}, a line of JSON. Returns the exit code."""
    print(json.dumps({"error": str(error)}), flush=True)
    return 1
