"""A trainer that is killed and started again between checkpoints."""

import os
import signal
from pathlib import Path
from typing import Any

from relaxd.run_folder import checkpoint_path, checkpoint_steps
from tests.integration.trainer.service_kit import Feeder, ScriptedCoordinator, TrainerProcess, make_config
from tests.kit.waiting import wait_until


def config_of(model: Path, *, every: int = 2, steps: int = 8, **trainer: Any) -> Any:
    checkpoint = {"every": every, **trainer.pop("checkpoint", {})}
    return make_config(model, run={"steps": steps}, trainer={"checkpoint": checkpoint, **trainer})


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def train_to(coordinator: ScriptedCoordinator, feeder: Feeder, term: int, first: int, last: int) -> None:
    for step in range(first, last + 1):
        feeder.feed(2, step - 1)
        coordinator.wait_for_version(term, step)


def wait_for_checkpoint(folder: Path, step: int) -> Path:
    wait_until(lambda: step in checkpoint_steps(folder))
    return checkpoint_path(folder, step)


def kill_and_wait(coordinator: ScriptedCoordinator, process: TrainerProcess, term: int, version: int) -> None:
    os.kill(process.rank_pid(), signal.SIGKILL)
    coordinator.wait_for_version(term, version)
