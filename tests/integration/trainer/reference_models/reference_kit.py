"""Runs with a reference that is refreshed, and a service of it."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from relaxd.config import RunConfig
from relaxd.roles import REFERENCE, ROLES
from tests.integration.trainer.service_kit import Feeder, ScriptedCoordinator, TrainerProcess, make_config
from tests.integration.trainer.training_worlds import RunJob

STEPS = 5
REFRESHED = {"refresh_every": 2}
AS_SERVICE = {**REFRESHED, "placement": "service", "threads": 1}


def config_of(model: Path, reference: dict[str, Any], **trainer: Any) -> RunConfig:
    """Five steps of one group; the reference takes over the weights after steps 2 and 4."""
    return make_config(
        model,
        run={"steps": STEPS},
        trainer={
            "groups_per_step": 1,
            "optimizer": {"lr": 1e-2, "epsilon": 1e-3},
            "checkpoint": {"every": 0},
            **trainer,
        },
        algorithm={"kl_coef": 0.3, "kl_estimator": "k2"},
        roles={"reference": reference},
        board={"max_staleness": 8},
    )


def prepare_run(redis_url: str, number: int, config: RunConfig, folder: Path) -> RunJob:
    """A run whose groups all wait for it, in a database of its own."""
    folder.mkdir(parents=True)
    job = RunJob(config, redis_url.removesuffix("/0") + f"/{number}", folder)
    feeder = Feeder(job.redis_url, config)
    for length in (6, 9, 4, 11, 7):
        feeder.feed(1, 0, length=length)
    feeder.board.close()
    return job


class Reference:
    """The replica of a run's reference, and its successor."""

    def __init__(self, job: RunJob) -> None:
        self._job = job
        self.coordinator = ScriptedCoordinator(job.config, job.folder, REFERENCE)
        self.start()

    def start(self) -> None:
        self.process = TrainerProcess(self.coordinator, self._job.redis_url, module=ROLES[REFERENCE].module)

    def kill(self) -> None:
        """Kill the rank, with which the replica ends."""
        os.kill(self.process.rank_pid(), signal.SIGKILL)
        assert self.process.process.wait(60) == 1
        self.process.close()

    def close(self) -> None:
        self.process.close()
        self.coordinator.close()


def log_softmax(folder: Path, samples: list[Any], **options: Any) -> torch.Tensor:
    """The log-probs of the whole vocabulary in the places of all trained tokens, float64."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), []
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens)[None]).logits[0] / sample.temperature
        found.append(logits.log_softmax(-1)[np.flatnonzero(sample.loss_mask) - 1])
    return torch.cat(found)
