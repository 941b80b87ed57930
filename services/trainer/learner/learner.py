"""The learner: a Megatron model that accumulates gradients from micro-batches and steps once they are all there."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from relaxd.algorithms import LossInputs, create
from relaxd.config import AlgorithmConfig, TrainerConfig
from services.trainer.attention.attention_kernels import attention_kernel
from services.trainer.attention.heads import rotary_table
from services.trainer.attention.sequence_layout import SequenceLayout, sequence_layout, to_device
from services.trainer.batch.packing import PackedMicroBatch, with_padding
from services.trainer.learner import mismatch
from services.trainer.learner.checkpoint import Snapshot, Stateful, load_snapshot
from services.trainer.learner.checkpoint_copies import HostCopies
from services.trainer.learner.data_parallel import DataParallel
from services.trainer.learner.logprobs import VocabShard, token_logprobs
from services.trainer.learner.offload import Offload, gradient_tensors, memory_in_use, state_tensors
from services.trainer.learner.optimizer import (
    NonFiniteGradients,
    build_optimizer,
    build_schedule,
    clip_and_step,
    gradient_norm,
)
from services.trainer.learner.sums import add, bits, total
from services.trainer.megatron.host_memory import GIVE_BACK_STEPS, give_back
from services.trainer.megatron.parallel import initialize
from services.trainer.mlp import expert_load
from services.trainer.mlp.routing import RouterInputs
from services.trainer.model.architecture import read_architecture
from services.trainer.model.hf_weights import (
    HFTensorSpec,
    exported_parameters,
    gather_hf_tensors,
    hf_tensor_specs,
    load_hf,
    save_hf,
)
from services.trainer.model.model import (
    PolicyModel,
    build_model,
    freeze_routers,
    padded_vocab,
    routers,
    transformer_config,
)

COLUMNS = ("rollout_logprobs", "advantages", "weight", "logprobs_comparable", "temperature", "ref_logprobs")
"""What the loss needs of each trained token."""


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did. The same on all ranks."""

    step: int
    """Which step it was, from 1."""
    loss: float
    """Summed loss divided by the normalizer."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    skipped: bool
    """Whether the update was skipped, so that weights, optimizer and schedule are as they were before the step."""
    lr: float
    """Learning rate of this step; of the last update that was done, where this one was skipped."""
    tokens: int
    """Trained tokens in the step, over all ranks."""
    metrics: dict[str, float]
    """The loss's sums divided by `tokens` (kl, entropy, clip_fraction ...), and how far the engine's log-probs were
    from the trainer's before the update: `mismatch.metrics`."""


@dataclass(frozen=True)
class _Inputs:
    """A micro-batch as tensors on this rank's device."""

    tokens: Tensor  # int64 [1, T / context ranks]: this rank's slice
    rotary: Tensor  # [2, T, 1, head_size / 2]
    layout: SequenceLayout
    # Of the tokens with loss_mask 1 the N that this rank's slice predicts:
    places: Tensor  # int64 [N]: which of them they are
    targets: Tensor  # int64 [N]: their ids
    predicting: Tensor  # int64 [N]: the token in the slice that predicts each one
    columns: dict[str, Tensor]  # float32 [N]: COLUMNS of the micro-batch, as far as it has them


class Learner:
    """Model, gradients and optimizer of this rank. All ranks make the same calls in the same order."""

    def __init__(
        self,
        model_folder: Path,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        steps: int,
        seed: int = 0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Join the Megatron world and load the model.

        Args:
            model_folder: a Hugging Face folder.
            trainer: sizes, optimizer, deadlines.
            algorithm: what to train with.
            steps: optimizer steps of the whole run, for the learning-rate schedule.
            seed: seeds every generator.
            tell: called about every second while ranks read or write files, with how far they are (`DiskWork.tell`).

        Raises:
            ModelError: the folder can't be used, or not divided like this.
            ValueError: the world or the optimizer's settings don't fit.
        """
        self._folder = model_folder
        self._config = trainer
        self._shape = read_architecture(model_folder)
        self._megatron_config = transformer_config(self._shape, trainer)
        self.world = initialize(trainer, seed)
        if tell is not None:
            self.world.disk.tell = tell
        self._algorithm = create(algorithm)
        self._kernel = attention_kernel(
            self.world.device, self._megatron_config.params_dtype, self._shape.head_size, trainer.attention
        )
        self._frequencies = self._shape.inverse_frequencies().to(self.world.device)
        rows = padded_vocab(self._shape.vocab_size, self.world.tensor_size) // self.world.tensor_size
        start = rows * self.world.tensor_rank
        shared = self.world.tensor_size > 1
        self._vocab = VocabShard(
            start=start,
            size=min(rows, self._shape.vocab_size - start),
            group=parallel_state.get_tensor_model_parallel_group() if shared else None,
        )
        self._policy = build_model(self._shape, self._megatron_config, self.world)
        load_hf(self._policy, model_folder, self._shape, self.world)
        self._routers = routers(self._policy)
        if trainer.moe.freeze_router:
            freeze_routers(self._policy)
        self._reference = self._frozen_copy() if self._algorithm.needs_reference else None
        self._model = DataParallel(self._policy)
        self._optimizer = build_optimizer(self._model, trainer)
        self._schedule = build_schedule(self._optimizer, trainer, steps)
        self._step = 0
        self._copies: HostCopies | None = None
        self._sums: dict[str, Tensor] = {}
        self._accumulated = False  # `_sums` won't tell: the last pipeline stage alone has any
        self._model.zero_grad_buffer()
        self._offload = Offload(self.world.device)
        self._exported = exported_parameters(self._policy, self._shape, self.world)
        self._changed = torch.cuda.Event() if self.world.device.type == "cuda" else None
        """When the GPU has the weights that `step` counts."""
        self._weights_changed()

    @property
    def step(self) -> int:
        """Optimizer steps done: the version of the weights."""
        return self._step

    def accumulate(self, micro_batches: Sequence[PackedMicroBatch]) -> None:
        """Run forward and backward and add the gradients of the summed loss to those that are already there.

        May be called any number of times before `finish`. Every data-parallel rank gives the same number of
        micro-batches per call (filled up with `empty_micro_batch`); ranks of one model, those that share its context
        included, give the same ones.
        """
        if not micro_batches:
            return
        self._accumulated = True
        if self._reference is not None:
            micro_batches = self._with_reference(micro_batches)
        for sums in self._run(self._model, micro_batches, self._loss, forward_only=False):
            for name, value in sums.items():
                # Not as numbers yet: that would wait for the GPU.
                self._sums[name] = add(name, self._sums[name], value) if name in self._sums else value

    def finish(
        self,
        normalizer: float,
        before_step: AbstractContextManager[Any] | None = None,
        *,
        skip: bool | None = None,
    ) -> StepStats:
        """Add up gradients over ranks, divide them by `normalizer`, clip, update the weights, clear the gradients.

        An update whose loss or gradient norm isn't finite is skipped: the step counts, but weights, optimizer state and
        schedule stay as they are. Both numbers are sums over the world, so all ranks decide the same.

        Args:
            normalizer: `Algorithm.normalizer` of the whole step over all ranks, > 0.
            before_step: entered when the gradients are ready and left when the weights have changed: where the caller
                waits for a running weight broadcast and keeps a new one out.
            skip: whether the update was skipped when the step was taken, for a step that is repeated.

        Raises:
            ValueError: the normalizer isn't positive.
            NonFiniteGradients: `skip` is False, but the loss or the gradient isn't finite. The accumulated gradients
                are dropped, and nothing else has changed.
        """
        if not normalizer > 0:
            raise ValueError(f"normalizer is {normalizer}: it must be positive")
        totals, self._sums = total(self._sums, self.world), {}
        load = self._expert_load()
        measured = totals.pop("mismatch", None)
        sums = {name: float(value) for name, value in totals.items()}
        tokens, loss = sums.pop("tokens", 0.0), sums.pop("loss", 0.0) / normalizer
        try:
            finalize_model_grads([self._model])
            if normalizer != 1.0:
                self._model.scale_gradients(1.0 / normalizer)
            self._let_copy()
            with before_step or nullcontext():
                grad_norm = gradient_norm(self._optimizer)
                finite = math.isfinite(loss) and math.isfinite(grad_norm)
                if skip is False and not finite:
                    raise NonFiniteGradients(
                        f"the update of step {self._step + 1} was done when the step was taken, but now its loss is "
                        f"{loss} and its gradient norm {grad_norm}"
                    )
                skipped = not finite if skip is None else skip
                if not skipped:
                    self._schedule.step(1)
                    clip_and_step(self._optimizer, self._config.optimizer.clip_grad, grad_norm)
                    self._weights_changed()
                self._step += 1
        finally:
            self.discard()
        if self._step % GIVE_BACK_STEPS == 0:
            give_back()
        lr = float(self._optimizer.param_groups[0]["lr"])
        metrics = {name: value / max(tokens, 1.0) for name, value in sums.items()}
        metrics |= load | (mismatch.metrics(measured) if measured is not None else {})
        return StepStats(self._step, loss, grad_norm, skipped, lr, int(tokens), metrics)

    def discard(self) -> None:
        """Forget the gradients that were accumulated since the last `finish`."""
        self._sums, self._accumulated = {}, False
        expert_load.forget(self._routers)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def log_probs(self, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        """Log-probs of the tokens with loss_mask 1 under the current weights.

        Returns:
            For each micro-batch float32 [T], 0 where loss_mask is 0. On all ranks of the model.
        """
        return self._log_probs(self._model, micro_batches)

    def hf_tensor_specs(self) -> list[HFTensorSpec]:
        """Every tensor of the model as `iter_hf_tensors` yields it, all stages, in order. Doesn't gather."""
        dtype = self._megatron_config.params_dtype
        return hf_tensor_specs(self._shape, dtype, self.world.stages, self.world.expert_size)

    def iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This stage's full tensors under their Hugging Face names; see `gather_hf_tensors`.

        In any thread: the current stream comes after the last optimizer step, not after what was enqueued since.
        """
        if self._changed is not None:
            torch.cuda.current_stream(self.world.device).wait_event(self._changed)
        return gather_hf_tensors(self._exported, self._shape, self.world, self.world.gather)

    def save_hf(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder. All ranks call it together."""
        save_hf(self._policy, folder, self._folder, self._shape, self.world)

    def checksum(self) -> int:
        """The sum of the weights' `bits`. Summed over ranks it tells, almost surely, whether two worlds that are
        arranged alike have the same weights; and it then still is a whole number as a float64, which metrics are."""
        return bits(self._policy.parameters(), self.world.device)

    def offload(self) -> tuple[int, int]:
        """Move weights, gradients and optimizer state to the host's memory; nothing else is called until `onload`.

        Returns the bytes in use on this rank's device before and after, see `memory_in_use`.
        """
        self._let_copy()
        before = memory_in_use(self.world.device)
        models = [self._policy] if self._reference is None else [self._policy, self._reference]
        tensors, gradients = state_tensors(models, self._optimizer), gradient_tensors(self._model)
        kept, zeros = (gradients, []) if self._accumulated else ([], gradients)
        self._offload.offload([*tensors, *kept], zeros)
        return before, memory_in_use(self.world.device)

    def onload(self) -> tuple[int, int]:
        """Move everything back, to the bit. Returns the bytes in use before and after."""
        before = memory_in_use(self.world.device)
        self._offload.onload()
        self._weights_changed()
        return before, memory_in_use(self.world.device)

    def snapshot(self, folder: Path) -> Snapshot:
        """Take the state after the last `finish`, to be written into an empty folder. All ranks call it together.

        The next change of the state waits for its copies.
        """
        self._let_copy()
        snapshot = Snapshot(self._stateful(), folder)
        self._copies = snapshot.copies
        return snapshot

    def restore(self, folder: Path, step: int, *, same_layout: bool) -> None:
        """Be as the learner was whose snapshot of a step is in a folder; see `load_snapshot`. All ranks together."""
        self._let_copy()
        load_snapshot(self._stateful(), folder, same_layout=same_layout)
        self._step = step
        self.discard()

    def _let_copy(self) -> None:
        """Wait until a snapshot has what it needs of the state as it is."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.let_go(self._config.collective_timeout_seconds)

    def _stateful(self) -> Stateful:
        return Stateful(self._policy, self._optimizer, self._schedule, self.world)

    def _expert_load(self) -> dict[str, float]:
        if not self._routers:
            return {}
        moe = self._config.moe
        with_losses = moe.aux_loss_coef > 0 or moe.z_loss_coef > 0
        return expert_load.metrics(self._routers, self.world, with_losses=with_losses)

    def _weights_changed(self) -> None:
        if self._changed is not None:
            self._changed.record(torch.cuda.current_stream(self.world.device))

    def _frozen_copy(self) -> PolicyModel:
        """The initial model, as the reference of the KL term."""
        reference = build_model(self._shape, self._megatron_config, self.world)
        load_hf(reference, self._folder, self._shape, self.world)
        return reference.requires_grad_(False)

    def _with_reference(self, micro_batches: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
        missing = [batch for batch in micro_batches if batch.ref_logprobs is None]
        computed = iter(self._log_probs(self._reference, missing) if missing else [])
        return [b if b.ref_logprobs is not None else replace(b, ref_logprobs=next(computed)) for b in micro_batches]

    def _log_probs(self, model: Any, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        results = [np.zeros(len(batch.tokens), np.float32) for batch in micro_batches]
        if not micro_batches:
            return results
        flat = torch.zeros(sum(int(b.loss_mask.sum()) for b in micro_batches), device=self.world.device)
        with torch.no_grad():
            outputs = self._run(model, micro_batches, self._evaluate, forward_only=True)
        begin = 0
        for batch, output in zip(micro_batches, outputs, strict=False):
            flat[begin + output["places"]] = output["logprobs"]
            begin += int(batch.loss_mask.sum())
        if outputs and self.world.context_size > 1:
            dist.all_reduce(flat, group=parallel_state.get_context_parallel_group())
        if self.world.stages > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        values, begin = flat.cpu().numpy(), 0
        for batch, result in zip(micro_batches, results, strict=True):
            places = np.flatnonzero(batch.loss_mask)
            result[places] = values[begin : begin + len(places)]
            begin += len(places)
        return results

    def _run(
        self, model: Any, micro_batches: Sequence[PackedMicroBatch], last: Any, *, forward_only: bool
    ) -> list[dict[str, Any]]:
        """Run Megatron's schedule.

        Returns:
            What `last(output weight, inputs, hidden)` reports for each micro-batch; nothing before the last stage.
        """
        policy: PolicyModel = getattr(model, "module", model)

        def forward(iterator: Iterator[_Inputs], model: Any) -> tuple[Tensor, Any]:
            inputs = next(iterator)
            hidden = model(inputs.tokens, inputs.rotary, inputs.layout)
            return hidden, partial(last, policy.output_weight(), inputs) if self.world.last_stage else None

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=map(self._inputs, micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=0,  # stages tell each other the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _inputs(self, batch: PackedMicroBatch) -> _Inputs:
        batch = with_padding(batch, self.world.tensor_size * self.world.context_size)
        device = self.world.device
        share = len(batch.tokens) // self.world.context_size
        begin = share * self.world.context_rank
        trained = np.flatnonzero(batch.loss_mask)
        predicting = batch.previous[trained]
        places = np.flatnonzero((predicting >= begin) & (predicting < begin + share))
        trained, predicting = trained[places], predicting[places] - begin
        names = [name for name in COLUMNS if getattr(batch, name) is not None]
        columns = np.stack([getattr(batch, name)[trained].astype(np.float32) for name in names])
        router = RouterInputs(weight=float(batch.weight[batch.loss_mask == 1].sum()))
        return _Inputs(
            tokens=to_device(batch.tokens[begin : begin + share], device).unsqueeze(0),
            rotary=rotary_table(to_device(batch.positions, device), self._frequencies),
            layout=sequence_layout(batch, device, self._kernel, router),
            places=to_device(places, device),
            targets=to_device(batch.tokens[trained], device),
            predicting=to_device(predicting, device),
            columns=dict(zip(names, to_device(columns, device), strict=True)),
        )

    def _token_logprobs(self, weight: Tensor, inputs: _Inputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the trained tokens only: no other position's logits are ever computed."""
        if self._megatron_config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        rows = hidden.squeeze(1).index_select(0, inputs.predicting)
        if self.world.tensor_size > 1 and not self._megatron_config.sequence_parallel:
            rows = tensor_parallel.copy_to_tensor_model_parallel_region(rows)
        return token_logprobs(rows, weight, inputs.targets, inputs.columns["temperature"], self._vocab)

    def _evaluate(self, weight: Tensor, inputs: _Inputs, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs, _ = self._token_logprobs(weight, inputs, hidden)
        return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), {"logprobs": logprobs, "places": inputs.places}

    def _loss(self, weight: Tensor, inputs: _Inputs, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs, entropy = self._token_logprobs(weight, inputs, hidden)
        columns = inputs.columns
        output = self._algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                rollout_logprobs=columns["rollout_logprobs"],
                advantages=columns["advantages"],
                mask=torch.ones_like(logprobs),
                weight=columns["weight"],
                ref_logprobs=columns.get("ref_logprobs"),
                entropy=entropy if self._algorithm.needs_entropy else entropy.detach(),
            )
        )
        sums = {"loss": output.loss.detach(), **output.sums}
        reported = {name: value.double() for name, value in sums.items()}
        reported["tokens"] = torch.tensor(float(logprobs.numel()), dtype=torch.float64)
        reported["mismatch"] = mismatch.measure(logprobs, columns["rollout_logprobs"], columns["logprobs_comparable"])
        return output.loss, torch.zeros((), dtype=torch.int), reported
