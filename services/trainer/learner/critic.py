"""The critic of PPO: its model, gradients and optimizer, which the learner drives together with the policy's."""

from collections.abc import Sequence
from pathlib import Path

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relaxd.algorithms.base import WithCritic
from relaxd.algorithms.loss_terms import clipped_value_loss
from relaxd.board import RETURNS, VALUES
from relaxd.config import CriticConfig, TrainerConfig
from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.learner.data_parallel import DataParallel
from services.trainer.learner.device_batch import DeviceBatch
from services.trainer.learner.forward import Forward, StageOutput, no_tokens
from services.trainer.learner.optimizer import build_optimizer, build_schedule
from services.trainer.learner.snapshot import TrainedModel
from services.trainer.learner.update import PendingUpdate
from services.trainer.model.policy_model import freeze_routers, routers
from services.trainer.transformer.router import reset_counters

VALUE_LOSS = "value_loss"
"""Name of the reported sum of the critic's loss over a micro-batch's tokens."""


class Critic:
    """One rank's part of the critic model. All ranks make the same calls in the same order."""

    def __init__(
        self,
        forward: Forward,
        algorithm: WithCritic,
        trainer: TrainerConfig,
        config: CriticConfig,
        folder: Path,
        *,
        steps: int,
    ) -> None:
        """Load the critic.

        Args:
            forward: forward passes on this rank.
            algorithm: the algorithm.
            trainer: parallel sizes and dtype, the same as for the policy.
            config: the critic's own settings.
            folder: the Hugging Face folder with the initial weights.
            steps: steps of the whole run, for the learning-rate schedule.

        Raises:
            ModelError: the folder's model has another architecture than the policy.
            ValueError: the optimizer's settings are wrong.
        """
        self._forward = forward
        self._clip = algorithm.value_clip
        self._clip_grad = config.optimizer.clip_grad
        self.module = forward.load_critic(folder)
        self._routers = routers(self.module)
        if trainer.moe.freeze_router:
            freeze_routers(self.module)
        self.model = DataParallel(self.module, overlap=trainer.overlap_grad_reduce, shard=trainer.shard_gradients)
        self.optimizer = build_optimizer(self.model, trainer, config.optimizer, seed=forward.seed)
        self._schedule = build_schedule(self.optimizer, config.optimizer, steps, "roles.critic.optimizer")
        self.model.zero_grad_buffer()

    @property
    def lr(self) -> float:
        """The learning rate of the last applied update."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def state(self) -> TrainedModel:
        """Model, optimizer and learning-rate schedule of the critic, for a checkpoint."""
        return TrainedModel(self.module, self.optimizer, self._schedule)

    def values(self, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        return self._forward.values(self.model, micro_batches)

    def accumulate(self, micro_batches: Sequence[PackedMicroBatch], *, last: bool) -> list[dict[str, Tensor]]:
        """Run forward and backward passes, and add up the gradients of the summed loss; see `Learner.accumulate`.

        Returns:
            For each micro-batch the sum of VALUE_LOSS, and the number of tokens whose value moved beyond the clip.
        """
        micro_batches = self._forward.padded(micro_batches)
        with self.model.accumulating(len(micro_batches), last=last):
            return self._forward.run(self.model, micro_batches, self._loss, forward_only=False)

    def pending(self, loss: float) -> PendingUpdate:
        """Return the critic's part of the next weight update: optimizer, schedule, loss and gradient clipping."""
        return PendingUpdate(self.optimizer, self._schedule, loss, self._clip_grad)

    def discard(self) -> None:
        """Discard the accumulated gradients."""
        reset_counters(self._routers)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _loss(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> StageOutput:
        """Return a micro-batch's value loss, summed with the token weights of the policy's loss, and sums to report."""
        values = self._forward.token_values(weight, batch, hidden)
        per_token, clipped = clipped_value_loss(values, batch.columns[VALUES], batch.columns[RETURNS], self._clip)
        loss = (batch.weight * per_token).sum()
        return loss, no_tokens(), {VALUE_LOSS: loss.detach().double(), "value_clip_fraction": clipped.double().sum()}
