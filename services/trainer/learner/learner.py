"""The learner: this rank's model, gradients and optimizer, and the order of calls in a step.

A step has one update or several, and ends with `end_step`. An update runs as follows, on all ranks at the same time.

1. `accumulate`, once per round of micro-batches. Megatron's pipeline schedule calls for each micro-batch

   - `to_device_batch`: this rank's slice of the packed tokens, copied to the device;
   - `PolicyModel`: this pipeline stage's forward pass, up to hidden states;
   - `PolicyLoss` on the last stage: log-probs of the trained tokens, then the algorithm's loss;
   - the backward pass, which adds to Megatron's float32 gradient buffers (`main_grad`).

   The losses are sums over tokens, so the division into micro-batches doesn't matter. In the round that the caller
   marks as the last, complete gradients are already summed over ranks; sharded gradients in every round.

2. `update`, once. It sums statistics and gradients over ranks, divides the gradients by the normalizer, waits
   for a running checkpoint's copies, and then clips and updates the weights, unless the update isn't finite. The
   gradients are cleared at the end.

With a critic, both calls do the same for the critic: it gets the same micro-batches, and is updated or skipped together
with the policy.

Between steps the loop may take a `snapshot`, `offload` the state to the host, or write the model (`save_hf`). Another
thread may broadcast the weights meanwhile (`iter_hf_tensors`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relaxd.algorithms import create
from relaxd.algorithms.base import WithCritic
from relaxd.algorithms.results import unexplained
from relaxd.config import AlgorithmConfig, CriticConfig, RunConfig, TrainerConfig
from relaxd.media.media_tokens import MediaTokens
from relaxd.models.folders import models_in_trainer, resolve_model
from relaxd.models.shape import ModelShape, read_shape
from relaxd.roles import REFERENCE
from services.trainer.batch.groups import RoutingShape, check_group
from services.trainer.batch.micro_batch import PackedMicroBatch, no_values, pack
from services.trainer.batch.sequence_media import GroupMediaReader
from services.trainer.learner.critic import VALUE_LOSS, Critic
from services.trainer.learner.data_parallel import DataParallel
from services.trainer.learner.forward import Forward
from services.trainer.learner.frozen_model import COLUMNS_OF, FrozenModel, Student
from services.trainer.learner.offload import TRIM_EVERY_STEPS, Offload, memory_in_use, state_tensors, trim_heap
from services.trainer.learner.optimizer import build_optimizer, build_schedule, reset_moments
from services.trainer.learner.policy_loss import (
    UNEXPLAINED,
    PolicyLoss,
    add_reported,
    bit_sum,
    mismatch_metrics,
    reduce_over_ranks,
)
from services.trainer.learner.snapshot import Checkpointed, Stateful, TrainedModel, load_snapshot
from services.trainer.learner.update import PendingUpdate, UpdateStats, reduce_gradients, update_weights
from services.trainer.model.hf_weights import (
    HFTensorSpec,
    KeptWeights,
    exported_parameters,
    gather_hf_tensors,
    hf_tensor_specs,
    save_hf,
)
from services.trainer.model.parameter_entries import freeze
from services.trainer.model.policy_model import freeze_routers, routers
from services.trainer.transformer.router import recorded_experts, recording, reset_counters, routing_metrics


class Learner(Checkpointed):
    """This rank's model, gradients and optimizer. All ranks make the same calls in the same order."""

    @classmethod
    def of_run(cls, config: RunConfig, report: Callable[[str], None] | None = None) -> "Learner":
        """Create the learner of a run, and load its models; see `__init__`.

        Raises:
            ModelError: as in `__init__`, and if the run has media, but one of the models takes none.
        """
        learner = cls(
            resolve_model(config.model.path),
            config.trainer,
            config.algorithm,
            steps=config.run.steps,
            seed=config.run.seed,
            chat_template=config.model.chat_template,
            frozen=models_in_trainer(config),
            critic=config.roles.critic,
            report=report,
        )
        for forward in (learner._forward, *(model.forward for model in learner._frozen)):
            forward.check_media(config)
        return learner

    def __init__(
        self,
        model_folder: Path,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        steps: int,
        seed: int = 0,
        chat_template: str | None = None,
        frozen: Mapping[str, Mapping[str, Path]] | None = None,
        critic: CriticConfig | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Join the Megatron world and load the model.

        Args:
            model_folder: a Hugging Face folder.
            trainer: parallel sizes, optimizer, deadlines.
            algorithm: the algorithm and its settings.
            steps: steps of the whole run, for the learning-rate schedule.
            seed: seed of all random generators.
            chat_template: template of the exported model, if it isn't the folder's.
            frozen: folders of the frozen models in these ranks, by role and name. Columns of models elsewhere come with
                the micro-batches. None: the initial model is the reference, if the algorithm needs one.
            critic: settings of the critic, if the algorithm has one; None: the defaults. With placement = "service",
                none is loaded here.
            report: called about every second with the progress of disk work (`DiskWork.report`).

        Raises:
            ModelError: a model isn't supported, or can't be divided among the ranks.
            ValueError: the number of processes or the optimizer's settings are wrong.
        """
        self._config = trainer
        self._chat_template = chat_template
        self._forward = Forward(model_folder, trainer, seed=seed, report=report)
        self._architecture = self._forward.architecture
        self.shape: ModelShape | None = read_shape(model_folder)
        """Sizes of the trained model, such as its layers and heads; None only in a rehearsal."""
        super().__init__(self._forward.world, trainer.collective_timeout_seconds)
        self._algorithm = create(algorithm)
        self._loss = PolicyLoss(self._algorithm, self._forward.token_logprobs, context_parallel=self.world.cp_size > 1)
        self._policy = self._forward.load(keep_rounding=True)
        freeze(self._policy, self._architecture, self.world, trainer)
        self._routers = routers(self._policy)
        for router in self._routers:  # the reference and the critic use their own routing
            router.replays = trainer.routing_replay != "none"
        if trainer.moe.freeze_router:
            freeze_routers(self._policy)
        self._frozen = self._load_frozen({REFERENCE: {"": model_folder}} if frozen is None else frozen)
        self._model = DataParallel(self._policy, overlap=trainer.overlap_grad_reduce, shard=trainer.shard_gradients)
        self._optimizer = build_optimizer(self._model, trainer, seed=seed)
        self._schedule = build_schedule(self._optimizer, trainer.optimizer, steps)
        self._critic: Critic | None = None
        critic = critic or CriticConfig()
        if self._algorithm.needs.values and critic.placement == "trainer":
            folder = resolve_model(critic.model) if critic.model else model_folder
            algorithm_with_critic = cast(WithCritic, self._algorithm)
            self._critic = Critic(self._forward, algorithm_with_critic, trainer, critic, folder, steps=steps)
        self.step = 0
        """Number of completed steps. Between steps it is also the version of the weights."""
        self.optimizer_steps = 0
        """Number of updates since the run's beginning that changed the weights."""
        self._changed_in_step = False
        """True if an update of the current step has changed the weights."""
        self._sums: dict[str, Tensor] = {}
        self._accumulated = False  # not the same as having `_sums`, which only the last pipeline stage has
        self._model.zero_grad_buffer()
        self._offload = Offload(self.world.device)
        self._exported = exported_parameters(self._policy, self._architecture, self.world)
        self._sent = self._exported
        """Parameters that weight broadcasts send: the model's own, or the copies that `keep_weights` made."""
        self._kept_weights: KeptWeights | None = None
        self._changed = torch.cuda.Event() if self.world.device.type == "cuda" else None
        """CUDA event recorded after the last change of the weights; None on a CPU."""
        self._record_weights_changed()

    @property
    def device_name(self) -> str:
        """Name of this rank's GPU; "" on a CPU."""
        return torch.cuda.get_device_name(self.world.device) if self.world.device.type == "cuda" else ""

    def report_to(self, report: Callable[[str], None]) -> None:
        """Set the progress callback of the trained and frozen models' passes; see `Forward.report`."""
        for forward in (self._forward, *(model.forward for model in self._frozen)):
            forward.report = report

    @property
    def routing(self) -> RoutingShape | None:
        """Numbers of layers and experts in the recorded routing to replay; None if routing isn't replayed."""
        experts = self._architecture.experts
        if experts is None or self._config.routing_replay == "none":
            return None
        return RoutingShape(self._architecture.layers, experts.per_token, experts.count)

    @property
    def media_tokens(self) -> MediaTokens | None:
        """Token ids with which the model marks media; None if it accepts no media."""
        return None if self._forward.vision is None else self._forward.vision.tokens

    @property
    def vocab_sizes(self) -> dict[str, int]:
        """Smallest vocabulary size of the frozen models of each role in these ranks, by role."""
        sizes: dict[str, int] = {}
        for model in self._frozen:
            size = model.forward.architecture.vocab_size
            sizes[model.role] = min(size, sizes.get(model.role, size))
        return sizes

    @property
    def weights_version(self) -> int | None:
        """Version of the weights; None in the middle of a step that has changed them."""
        return None if self._changed_in_step else self.step

    def accumulate(self, micro_batches: Sequence[PackedMicroBatch], *, last: bool = False) -> None:
        """Run forward and backward passes, and add up the gradients of the summed loss.

        Call it any number of times before `update`. All data-parallel ranks pass the same number of micro-batches per
        call, padded with `empty_micro_batch`; all ranks of one data-parallel replica pass the same micro-batches.

        Args:
            micro_batches: the micro-batches.
            last: whether `update` or `discard` is next, so that gradients can be reduced as they are completed.
                `update` reduces the rest.

        Raises:
            RuntimeError: an earlier call for this update had `last`.
        """
        if not micro_batches:
            return
        self._accumulated = True
        micro_batches = self._forward.padded(self._with_frozen_columns(micro_batches))
        with self._model.accumulating(len(micro_batches), last=last):
            reported = self._forward.run(self._model, micro_batches, self._loss, forward_only=False)
        if self._critic is not None:
            reported += self._critic.accumulate(micro_batches, last=last)
        for sums in reported:
            add_reported(self._sums, sums)  # tensors, not floats: converting would wait for the GPU

    def finish(self, normalizer: float, *, skip: bool | None = None) -> UpdateStats:
        """Finish a step that has a single update: call `update`, then `end_step`."""
        stats = self.update(normalizer, skip=skip)
        self.end_step()
        return stats

    def end_step(self, refreshed: Collection[str] = ()) -> None:
        """End a step: its weights become the next version, even if updates were skipped.

        Args:
            refreshed: roles whose frozen models get a copy of the new weights.
        """
        for model in self._frozen:
            if model.role in refreshed:
                model.refresh(self._policy)
        self.step += 1
        self._changed_in_step = False
        self._sent = self._exported
        self._reset_moments_if_due()
        if self.step % TRIM_EVERY_STEPS == 0:
            trim_heap()

    def update(self, normalizer: float, *, skip: bool | None = None) -> UpdateStats:
        """Sum gradients over ranks, divide them by `normalizer`, clip, update the weights, clear the gradients.

        An update whose loss or gradient norm isn't finite is skipped: weights, optimizer state and schedule stay
        unchanged. Both numbers are sums over the world, so all ranks decide alike.

        Args:
            normalizer: `Algorithm.normalizer` of all accumulated micro-batches of all ranks, > 0.
            skip: for a replayed step, whether this update was skipped before; None: decide by the numbers.

        Raises:
            ValueError: the normalizer isn't positive.
            NonFiniteGradients: `skip` is False, but loss or gradient norm isn't finite. The accumulated gradients are
                dropped; nothing else has changed.
        """
        if not normalizer > 0:
            raise ValueError(f"normalizer is {normalizer}: it must be positive")
        sums, self._sums = reduce_over_ranks(self._sums, self.world), {}
        measured = sums.pop("mismatch", None)
        values = {name: float(value) for name, value in sums.items()}
        tokens = values.pop("tokens", 0.0)
        loss, value_loss = (values.pop(name, 0.0) / normalizer for name in ("loss", VALUE_LOSS))
        cause = unexplained(self._algorithm) if values.pop(UNEXPLAINED, 0.0) else ""
        metrics = {name: value / max(tokens, 1.0) for name, value in values.items()}
        metrics |= self._expert_metrics() | (mismatch_metrics(measured) if measured is not None else {})
        parts = [PendingUpdate(self._optimizer, self._schedule, loss, self._config.optimizer.clip_grad)]
        try:
            reduce_gradients(self._model, normalizer)
            if self._critic is not None:
                reduce_gradients(self._critic.model, normalizer)
                parts.append(self._critic.pending(value_loss))
            self._wait_for_copies()
            first = not self._changed_in_step
            grad_norms, skipped = update_weights(parts, step=self.step + 1, first=first, skip=skip)
            if not skipped:
                self._changed_in_step = True
                self.optimizer_steps += 1
                self._record_weights_changed()
        finally:
            self.discard()
        if self._critic is not None:
            metrics |= {VALUE_LOSS: value_loss, "value_grad_norm": grad_norms[1], "value_lr": self._critic.lr}
        return UpdateStats(
            step=self.step + 1,
            loss=loss,
            grad_norm=grad_norms[0],
            skipped=skipped,
            lr=float(self._optimizer.param_groups[0]["lr"]),
            tokens=int(tokens),
            metrics=metrics,
            cause=cause,
        )

    def discard(self) -> None:
        """Discard the gradients accumulated since the last call of `update`."""
        self._sums, self._accumulated = {}, False
        reset_counters(self._routers)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._critic is not None:
            self._critic.discard()

    def log_probs(self, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        """Compute the log-probs of the tokens with loss_mask 1 under the current weights.

        Returns:
            For each micro-batch float32 [T], 0 where loss_mask is 0; on all ranks.
        """
        return self._forward.log_probs(self._model, micro_batches)

    def log_probs_and_experts(
        self, micro_batches: Sequence[PackedMicroBatch]
    ) -> tuple[list[NDArray[np.float32]], list[NDArray[np.unsignedinteger]]]:
        """Compute `log_probs`, and record the tokens' experts in this pass; see `recorded_experts`."""
        with recording(self._routers):
            logprobs = self.log_probs(micro_batches)
            return logprobs, recorded_experts(self._routers, micro_batches, self.world)

    def frozen_columns(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        roles: Collection[str] = tuple(COLUMNS_OF),
        name: str | None = None,
    ) -> list[dict[str, NDArray[Any]]]:
        """Compute the columns of the frozen models in these ranks, for the tokens with loss_mask 1.

        Args:
            micro_batches: the micro-batches.
            roles: roles of the models to use.
            name: name of the model to use among those of a role; None: any name.

        Returns:
            The columns of each micro-batch, [T] or [T, k]; on all ranks.
        """
        found: list[dict[str, NDArray[Any]]] = [{} for _ in micro_batches]
        for model in self._frozen:
            if model.role not in roles or name not in (None, model.name):
                continue
            own = model.compute(micro_batches, Student(self._forward, self._model))
            for columns, others in zip(found, own, strict=True):
                columns |= others
        return found

    def values(self, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        """Compute the critic's values for the tokens with loss_mask 1, each from the hidden state of the token before.

        Returns:
            For each micro-batch float32 [T], 0 where loss_mask is 0; on all ranks.
        """
        assert self._critic is not None
        return self._critic.values(micro_batches)

    def hf_tensor_specs(self) -> list[HFTensorSpec]:
        """Return the specs of all stages' Hugging Face tensors, in the order of `iter_hf_tensors`. Doesn't gather."""
        dtype = self._forward.megatron_config.params_dtype
        return hf_tensor_specs(self._architecture, dtype, self.world.layout)

    def keep_weights(self) -> None:
        """Copy the weights. Until `end_step`, `iter_hf_tensors` gathers the copy, so updates don't affect it.

        No thread may be in `iter_hf_tensors` during this call or a call of `end_step`.
        """
        if self._kept_weights is None:
            self._kept_weights = KeptWeights(self._exported, self.world)
        self._kept_weights.copy()
        self._sent = self._kept_weights.exported

    def iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather this stage's full tensors under their Hugging Face names; see `gather_hf_tensors`.

        May run in any thread. The current stream waits for the last optimizer step, but not for later work.
        """
        if self._changed is not None and self._sent is self._exported:
            torch.cuda.current_stream(self.world.device).wait_event(self._changed)
        return gather_hf_tensors(self._sent, self._architecture, self.world, self.world.gather)

    def save_hf(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder. All ranks call it together."""
        original = self._forward.folder
        save_hf(self._policy, folder, original, self._architecture, self.world, self._chat_template)

    def checksum(self) -> int:
        """Return the `bit_sum` of this rank's weights, including a critic's.

        The sum over ranks is almost surely different for different weights in the same parallel layout, and is exact
        as a float64 metric.
        """
        models = [self._policy] if self._critic is None else [self._policy, self._critic.module]
        return bit_sum((parameter for model in models for parameter in model.parameters()), self.world.device)

    def offload(self) -> tuple[int, int]:
        """Move weights, optimizer state and accumulated gradients to the host's memory; free empty gradient buffers.

        The next call must be `onload`. With `trainer.offload` = false only empty gradient buffers are freed. Returns
        the bytes in use on this rank's device before and after; see `memory_in_use`.
        """
        self._wait_for_copies()
        self._model.wait_for_reduction()
        before = memory_in_use(self.world.device)
        models = [self._policy, *(model.module for model in self._frozen)]
        tensors, gradients = state_tensors(models, self._optimizer), list(self._model.gradient_tensors)
        if (critic := self._critic) is not None:
            tensors += state_tensors([critic.module], critic.optimizer)
            critic.model.wait_for_reduction()
            gradients += critic.model.gradient_tensors
        kept, zeros = (gradients, []) if self._accumulated else ([], gradients)
        self._offload.offload([*tensors, *kept] if self._config.offload else [], zeros)
        return before, memory_in_use(self.world.device)

    def onload(self) -> tuple[int, int]:
        """Move everything that `offload` moved back, unchanged. Returns the device's bytes in use before and after."""
        before = memory_in_use(self.world.device)
        self._offload.onload()
        self._record_weights_changed()
        return before, memory_in_use(self.world.device)

    def restore(self, folder: Path, step: int, *, same_layout: bool) -> None:
        """Load a step's checkpoint from `folder`; see `load_snapshot`. All ranks call it together."""
        self._wait_for_copies()
        self.optimizer_steps = load_snapshot(self._stateful(step), folder, same_layout=same_layout).optimizer_steps
        self.step, self._changed_in_step = step, False
        self._reset_moments_if_due()  # the configuration may have named the step after its checkpoint was taken
        self.discard()

    def _reset_moments_if_due(self) -> None:
        if self._config.resets_moments(self.step):
            self._wait_for_copies()
            reset_moments(self._optimizer)

    def _stateful(self, step: int) -> Stateful:
        return Stateful(
            policy=TrainedModel(self._policy, self._optimizer, self._schedule),
            critic=None if self._critic is None else self._critic.state,
            frozen={model.role: model for model in self._frozen},
            step=step,
            world=self.world,
            optimizer_steps=self.optimizer_steps,
            moments=self._config.checkpoint.moments,
        )

    def _expert_metrics(self) -> dict[str, float]:
        if not self._routers:
            return {}
        moe = self._config.moe
        with_losses = moe.aux_loss_coef > 0 or moe.z_loss_coef > 0
        return routing_metrics(self._routers, self.world, with_losses=with_losses)

    def _record_weights_changed(self) -> None:
        if self._changed is not None:
            self._changed.record(torch.cuda.current_stream(self.world.device))

    def _load_frozen(self, folders: Mapping[str, Mapping[str, Path]]) -> list[FrozenModel]:
        """Load those frozen models that compute a column which the loss or the advantages need."""
        needs, trainer = self._algorithm.needs, self._config.model_copy(update={"recompute": "none"})
        wanted, vocabulary = {*needs.loss, *needs.advantages}, self._architecture.vocab_size
        return [
            FrozenModel(role, Forward(folder, trainer, world=self.world), needs, wanted, vocabulary, name)
            for role, by_name in folders.items()
            for name, folder in by_name.items()
            if wanted.intersection(COLUMNS_OF[role])
        ]

    def _with_frozen_columns(self, micro_batches: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
        """Return the micro-batches with all columns of frozen models that the loss needs; compute missing ones."""
        needed = {name for names in COLUMNS_OF.values() for name in names}.intersection(self._algorithm.needs.loss)
        completed = list(micro_batches)
        lacking = [index for index, batch in enumerate(completed) if not needed <= batch.columns.keys()]
        computed = self.frozen_columns([completed[index] for index in lacking])
        for index, columns in zip(lacking, computed, strict=True):
            batch = completed[index]
            columns |= batch.columns
            if missing := sorted(needed - columns.keys()):
                if batch.loss_mask.any():
                    raise ValueError(f"{missing[0]} is missing, and this learner keeps no model that could compute it")
                columns |= no_values(missing, len(batch.tokens))
            completed[index] = replace(batch, columns=columns)
        return completed


class OfflineLearner(Learner):
    """A learner of one rank without service and loop, with one update in each step, for groups in the board's form;
    examples/one_page.py uses it."""

    def train(self, groups: Mapping[str, Mapping[str, Any]], temperature: float = 1.0) -> UpdateStats:
        """Train a step on groups: check and pack each, add up gradients, update the weights.

        Args:
            groups: the columns that the stage "train" reads, by the group's id.
            temperature: sampling temperature of the answers.

        Raises MalformedGroup: a column is missing or malformed.
        """
        tokens = self.media_tokens
        media = None if tokens is None else GroupMediaReader(tokens)
        checked = [check_group(group_id, columns, columns, media=tokens) for group_id, columns in groups.items()]
        for group in checked:
            every, packed = range(len(group.lengths)), self._algorithm.needs.loss
            sequences = group.sequences(every, packed, self._algorithm, temperature, self.step, media=media)
            self.accumulate([pack(sequences)])
        trained, samples = sum(group.trained_tokens for group in checked), sum(group.samples for group in checked)
        return self.finish(self._algorithm.normalizer(trained, samples))
