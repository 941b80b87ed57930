"""The trainer of a rehearsal: real intake, packing, plans, step files and commits, but no model. Learning and
broadcasting only sleep for their simulated time.
"""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from relaxd.board import REF_LOGPROBS
from relaxd.config import RehearsalConfig, RunConfig
from relaxd.data.vision import read_vision
from relaxd.models.folders import resolve_model
from relaxd.models.shape import ModelShape
from relaxd.v1.trainer_pb2 import BroadcastWeightsResponse
from relaxd.weights.buckets import TensorBucket, TensorSpec, plan_buckets
from services.trainer.batch.groups import RoutingShape
from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.learner.learner import Learner
from services.trainer.learner.update import UpdateStats
from services.trainer.loop.training_rank import Rank
from services.trainer.loop.weight_broadcast import WeightBroadcaster
from services.trainer.megatron.world import initialize

FORWARD_SPEED = 3.0
"""Assumed speed of a forward pass, as a multiple of the speed of forward and backward together."""


class ScriptedLearner:
    """Simulated learner: has the methods of `Learner` that a step calls, and only sleeps, as `[rehearsal]` says."""

    def __init__(self, config: RunConfig) -> None:
        """Join the trainer's process groups, as a real learner does."""
        self.world = initialize(config.trainer, config.run.seed)
        self._rehearsal = config.rehearsal
        # The ranks work at the same time, each on its share of the tokens.
        self._tokens_per_second = config.rehearsal.train_tokens_per_second / self.world.dp_size
        self._tokens = 0
        self.step = 0
        self.optimizer_steps = 0
        self.media_tokens = read_vision(resolve_model(config.model.path)).tokens if config.has_media else None
        self.routing = RoutingShape(*config.rehearsal.experts, experts=256)
        self.vocab_sizes: dict[str, int] = {}
        self.shape: ModelShape | None = None
        self.device_name = ""

    @property
    def weights_version(self) -> int:
        """Version of the simulated weights: the number of trained steps."""
        return self.step

    def report_to(self, report: Callable[[str], None]) -> None:
        """Ignore `report`: simulated passes have no progress."""

    def accumulate(self, micro_batches: Sequence[PackedMicroBatch], *, last: bool = False) -> None:
        """Sleep for the simulated time of forward and backward passes."""
        tokens = sum(len(batch.tokens) for batch in micro_batches)
        self._tokens += tokens
        time.sleep(tokens / self._tokens_per_second)

    def log_probs(self, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        """Sleep for a forward pass's simulated time. Return zeros as log-probs: float32 [T] for each micro-batch."""
        tokens = sum(len(batch.tokens) for batch in micro_batches)
        time.sleep(tokens / self._tokens_per_second / FORWARD_SPEED)
        return [np.zeros(len(batch.tokens), np.float32) for batch in micro_batches]

    def frozen_columns(
        self, micro_batches: Sequence[PackedMicroBatch], roles: Collection[str] = (), name: str | None = None
    ) -> list[dict[str, NDArray[np.float32]]]:
        """Sleep for a forward pass's simulated time. Return zeros as log-probs of the reference."""
        return [{REF_LOGPROBS: logprobs} for logprobs in self.log_probs(micro_batches)]

    def log_probs_and_experts(
        self, micro_batches: Sequence[PackedMicroBatch]
    ) -> tuple[list[NDArray[np.float32]], list[NDArray[np.unsignedinteger]]]:
        """Return the result of `log_probs`, and zeros as each token's chosen experts: uint8 [T, layers, top_k]."""
        experts = [np.zeros((len(batch.tokens), *self._rehearsal.experts), np.uint8) for batch in micro_batches]
        return self.log_probs(micro_batches), experts

    def update(self, normalizer: float, *, skip: bool | None = None) -> UpdateStats:
        """Sleep for the simulated time of an optimizer update. Return made-up statistics."""
        time.sleep(self._rehearsal.update_seconds)
        tokens, self._tokens = self._tokens, 0
        self.optimizer_steps += 1
        return UpdateStats(
            step=self.step + 1, loss=0.0, grad_norm=1.0, skipped=False, lr=0.0, tokens=tokens, metrics={}
        )

    def keep_weights(self) -> None:
        """Copy nothing: there is no model."""

    def end_step(self, refreshed: Collection[str] = ()) -> None:
        """Count the step as trained."""
        self.step += 1

    def discard(self) -> None:
        """Reset the number of accumulated tokens."""
        self._tokens = 0

    def checksum(self) -> int:
        """Return 0: there are no weights."""
        return 0

    def save_hf(self, folder: Path) -> None:
        """Write nothing: there is no model."""


CHECKSUM = {"scripted": 1}
"""Weight checksums that trainer and engines of a rehearsal report, by tensor name."""


class ScriptedBroadcaster:
    """Simulated weight broadcaster: sleeps for the modelled time and sends nothing."""

    def __init__(self, rehearsal: RehearsalConfig) -> None:
        self._seconds = rehearsal.sync_seconds

    def join(self, *group: Any) -> None:
        """Do nothing: there is no group to join."""

    def leave(self, name: str) -> None:
        """Do nothing: there is no group to leave."""

    def broadcast(self, name: str, timeout: float, with_checksums: bool) -> BroadcastWeightsResponse:
        """Sleep for the simulated time of a weight broadcast."""
        time.sleep(self._seconds)
        return BroadcastWeightsResponse(seconds=self._seconds, checksums=CHECKSUM if with_checksums else {})


class ScriptedRank(Rank):
    """A trainer rank with simulated learner and broadcaster, and without a model."""

    def _load(self, config: RunConfig) -> tuple[Learner, list[TensorBucket], WeightBroadcaster]:
        names = (f"model.layers.{index // 10}.mlp.experts.{index}.weight" for index in range(config.rehearsal.tensors))
        specs = [TensorSpec(name, torch.bfloat16, (4096, 4096)) for name in names]
        learner = cast(Learner, ScriptedLearner(config))
        broadcaster = cast(WeightBroadcaster, ScriptedBroadcaster(config.rehearsal))
        return learner, plan_buckets(specs, config.weights.bucket_bytes, 0), broadcaster


if __name__ == "__main__":
    ScriptedRank().serve()
