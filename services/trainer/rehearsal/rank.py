"""One rank of a rehearsal's trainer: `loop.rank` with a scripted learner and broadcast."""

import time
from typing import Any, cast

import torch

from relaxd.config import RehearsalConfig, RunConfig
from relaxd.v1.trainer_pb2 import BroadcastWeightsResponse
from relaxd.weights.manifest import TensorBucket, TensorSpec, plan_buckets
from services.trainer.learner.learner import Learner
from services.trainer.loop.broadcast import WeightBroadcaster
from services.trainer.loop.rank import Rank
from services.trainer.rehearsal.learner import ScriptedLearner

CHECKSUM = {"scripted": 1}
"""Checksums that trainer and engines of a rehearsal report."""


class ScriptedBroadcaster:
    """Sends nothing, in the time that a broadcast takes."""

    def __init__(self, rehearsal: RehearsalConfig) -> None:
        self._seconds = rehearsal.sync_seconds

    def join(self, *group: Any) -> None:
        """Connect to no one."""

    def leave(self, name: str) -> None:
        """Leave nothing."""

    def broadcast(self, name: str, timeout: float, with_checksums: bool) -> BroadcastWeightsResponse:
        """Wait as long as the weights would travel."""
        time.sleep(self._seconds)
        return BroadcastWeightsResponse(seconds=self._seconds, checksums=CHECKSUM if with_checksums else {})


class ScriptedRank(Rank):
    """A rank without a model."""

    def _load(self, config: RunConfig) -> tuple[Learner, list[TensorBucket], WeightBroadcaster]:
        names = (f"model.layers.{index // 10}.mlp.experts.{index}.weight" for index in range(config.rehearsal.tensors))
        specs = [TensorSpec(name, torch.bfloat16, (4096, 4096)) for name in names]
        learner = cast(Learner, ScriptedLearner(config))
        broadcaster = cast(WeightBroadcaster, ScriptedBroadcaster(config.rehearsal))
        return learner, plan_buckets(specs, config.weights.bucket_bytes, 0), broadcaster


if __name__ == "__main__":
    ScriptedRank().serve()
