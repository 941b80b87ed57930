"""Forward and backward passes of a rank in a Megatron world: loads a model and runs micro-batches through it.

The learner trains the model that it loads here; a reference service only computes log-probs.
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray
from torch import Tensor

from relaxd.board import CANDIDATES, TEACHER_CANDIDATE_LOGPROBS
from relaxd.config import RunConfig, TrainerConfig
from relaxd.data.vision import VisionModel, read_vision
from relaxd.models import DataError
from relaxd.models.layouts import context_division
from services.trainer.batch.micro_batch import PackedMicroBatch, empty_micro_batch
from services.trainer.batch.step_plan import group_size
from services.trainer.learner.device_batch import DeviceBatch, to_device_batch
from services.trainer.learner.logprobs import TokenLogprobs, VocabShard, likeliest_tokens, token_logprobs
from services.trainer.megatron.world import World, initialize
from services.trainer.model.architecture import ModelError
from services.trainer.model.architectures import read_architecture
from services.trainer.model.hf_weights import load_hf
from services.trainer.model.policy_model import (
    VALUE_HEAD,
    InterleavedModel,
    PolicyModel,
    StageModel,
    build_critic,
    build_model,
    check_divisible,
    padded_vocab,
    transformer_config,
)
from services.trainer.model.towers import TOWERS
from services.trainer.transformer.activation_memory import ActivationOffload
from services.trainer.transformer.attention_kernels import attention_kernel, takes_prompts_once
from services.trainer.transformer.context_parallel import context_ranks

StageOutput = tuple[Tensor, Tensor, dict[str, Tensor]]
"""The last stage's result for a micro-batch, for Megatron: loss, a token count that is not used, values to report."""
OutputFunction = Callable[[Tensor, DeviceBatch, Tensor], StageOutput]
"""Type of functions that compute the last stage's output. Arguments: the output layer's weight, the micro-batch, and
the hidden states of T tokens, [T / cp_size, 1, hidden]; under sequence parallelism [T / cp_size / tp_size, 1, hidden].
"""
TokenFunction = Callable[[Tensor, DeviceBatch, Tensor], Tensor]
"""Type of functions with the arguments of `OutputFunction` that return a value per trained token, [N], or several,
[N, width]."""
OFFLOAD_AHEAD = {"full": 2, "selective": 8, "none": 12}
"""Number of activation tensors on a GPU that may be in transfer to or from the host, by `trainer.recompute`: about as
many as one layer saves; for "full", the inputs of two layers."""
OUTPUT_LAYER = "output_layer.weight"
"""Name of the policy's output layer weight; a critic has no such parameter."""


Shape = list[int]


class StageExchange(P2PCommunicator):
    """Megatron's exchange of hidden states and their gradients in one schedule, without waiting for a GPU.

    Micro-batches differ in length. Megatron would send each tensor's shape ahead, and the host would wait for the GPU
    to finish all earlier work; the GPU would then idle while the host prepares more. But all stages have the same
    micro-batches, so each knows the shapes.
    """

    def __init__(self, config: ModelParallelConfig, shapes: Sequence[Shape]) -> None:
        """Prepare for a schedule.

        Args:
            config: the model's configuration. With several chunks, its microbatch_group_size_per_vp_stage must be set:
                the number of micro-batches that go through a chunk before the next chunk.
            shapes: shape of each micro-batch's hidden states between stages.
        """
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._forward: Iterator[Shape] = iter(shapes)
        self._backward: Iterator[Shape] = iter(shapes)
        if (chunks := config.virtual_pipeline_model_parallel_size) is not None:
            # Order of micro-batches through this stage's chunks: forward from the first, backward from the last chunk.
            # The model's first chunk receives no hidden states, its last chunk no gradients.
            passes = get_schedule_table(len(shapes), chunks, config.microbatch_group_size_per_vp_stage)
            first, last = self.pp_group.rank() == 0, self.pp_group.rank() == self.pp_group.size() - 1
            self._forward = iter([shapes[number] for number, turn in passes if turn or not first])
            self._backward = iter([shapes[number] for number, turn in passes if turn or not last])

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """Return the shapes of the tensors to receive next from the previous and the next stage; [] if none."""
        return next(self._forward) if recv_prev else [], next(self._backward) if recv_next else []


def pipeline_groups() -> ProcessGroupCollection:
    """Return the process groups that Megatron's pipeline schedules require besides the communicator."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    return groups


class Forward:
    """Runs forward and backward passes of models on this rank. All ranks make the same calls in the same order."""

    def __init__(
        self,
        folder: Path,
        trainer: TrainerConfig,
        *,
        seed: int = 0,
        report: Callable[[str], None] | None = None,
        world: World | None = None,
    ) -> None:
        """Join the Megatron world.

        Args:
            folder: a Hugging Face folder.
            trainer: parallel sizes, dtype, attention, deadlines.
            seed: seed of all random generators.
            report: called about every second with the progress of disk work (`DiskWork.report`).
            world: the world, if this process has already joined it.

        Raises:
            ModelError: the model isn't supported, or can't be divided among the ranks.
            ValueError: the number of processes is wrong.
        """
        self.folder = folder
        self.seed = seed
        self.architecture = read_architecture(folder)
        check_divisible(folder, trainer)
        self.megatron_config = transformer_config(self.architecture, trainer)
        self.world = initialize(trainer, seed) if world is None else world
        if report is not None:
            self.world.disk.report = report
        self.report: Callable[[str], None] = lambda text: None
        """Function called with a progress text when a micro-batch begins; not called for a single micro-batch."""
        self.vocab = _vocab_shard(self.architecture.vocab_size, self.world)
        self._float32_logits = trainer.fp32_lm_head
        division = context_division(
            trainer.context_parallel,
            self.architecture.heads // trainer.tensor_parallel,
            self.architecture.kv_heads // trainer.tensor_parallel,
        )
        timeout = timedelta(seconds=trainer.collective_timeout_seconds)
        context = context_ranks(parallel_state.get_context_parallel_group(), division, timeout)
        head_size, window = self.architecture.head_size, self.architecture.window
        dtype, configured = self.megatron_config.params_dtype, trainer.attention
        kernel = attention_kernel(
            self.world.device, dtype, head_size, configured, window, sliced=division.gathering > 1
        )
        prompts_once = division.gathering == 1 and takes_prompts_once(kernel, configured, head_size, window is not None)
        self._offload = None
        if trainer.activation_offload_bytes:
            limit, ahead = trainer.activation_offload_bytes, OFFLOAD_AHEAD[trainer.recompute]
            self._offload = ActivationOffload(self.world.device, limit, ahead)
        self.vision = _read_vision(folder) if self.architecture.towers else None
        """Rules by which the model reads media; None if it accepts no media."""
        self._to_device = partial(
            to_device_batch,
            world=self.world,
            kernel=kernel,
            rotary=self.architecture.rope.rotary(head_size).to(self.world.device),
            context=context,
            prompts_once=prompts_once,
            vision=self.vision,
            convolution=0 if self.architecture.delta_net is None else self.architecture.delta_net.convolution,
        )

    def check_media(self, config: RunConfig) -> None:
        """Raise ModelError if a run has media, but the model takes none."""
        if config.has_media and self.vision is None:
            raise ModelError(
                f"the run has media ({config.media_setting}), but {self.folder} has a model of type "
                f"{self.architecture.model_type!r}, which the trainer doesn't let see"
            )

    def load(self, *, keep_rounding: bool = False) -> StageModel:
        """Build this rank's part of the model and load its weights (`load_hf`)."""
        model = build_model(self.architecture, self.megatron_config, self.world)
        model.offload_activations(self._offload)
        load_hf(model, self.folder, self.architecture, self.world, keep_rounding=keep_rounding)
        return model

    def load_critic(self, folder: Path) -> StageModel:
        """Build this rank's part of the critic and load its weights except the head, which is zero.

        Towers aren't trained.

        Raises:
            ModelError: the folder's model has another architecture than this one.
        """
        shape = replace(read_architecture(folder), tied_embeddings=self.architecture.tied_embeddings)
        for name, size in asdict(self.architecture).items():
            if (other := asdict(shape)[name]) != size:
                raise ModelError(
                    f"roles.critic.model: {folder} has {name} {other}, but the model to train has {size}: a critic has "
                    "the architecture of model.path"
                )
        model = build_critic(self.architecture, self.megatron_config, self.world)
        model.offload_activations(self._offload)
        load_hf(model, folder, self.architecture, self.world, without=(OUTPUT_LAYER, VALUE_HEAD), keep_rounding=True)
        for name, parameter in model.named_parameters():
            if TOWERS in name.split("."):
                parameter.requires_grad_(False)
        return model

    def log_probs(self, model: Any, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        """Compute the log-probs of the tokens with loss_mask 1 under a model and the sampling temperature.

        Returns:
            For each micro-batch float32 [T], 0 where loss_mask is 0; on all ranks.
        """
        return self._per_token(model, micro_batches, lambda *last: self.token_logprobs(*last).tokens)

    def likeliest(
        self, model: Any, micro_batches: Sequence[PackedMicroBatch], count: int, *, ids_below: int
    ) -> list[dict[str, NDArray[Any]]]:
        """Find a model's likeliest tokens at the positions of the tokens with loss_mask 1.

        Args:
            model: the model.
            micro_batches: the micro-batches.
            count: k, number of tokens at each position.
            ids_below: only ids below this are chosen; at least k.

        Returns:
            For each micro-batch the columns CANDIDATES, int32 [T, k], and TEACHER_CANDIDATE_LOGPROBS, float32 [T, k];
            -1 and 0 where loss_mask is 0; on all ranks.
        """

        def compute(weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> Tensor:
            found = likeliest_tokens(
                self._rows(batch, hidden),
                weight,
                batch.temperature,
                self.vocab,
                count,
                ids_below=ids_below,
                float32_logits=self._float32_logits,
            )
            return torch.cat([found.ids.float(), found.logprobs], -1)  # exact for ids below 2^24

        rows = self._per_token(model, micro_batches, compute, 2 * count)
        return [
            {
                CANDIDATES: np.where(batch.loss_mask[:, None] != 0, row[:, :count], -1).astype(np.int32),
                TEACHER_CANDIDATE_LOGPROBS: np.ascontiguousarray(row[:, count:]),
            }
            for batch, row in zip(micro_batches, rows, strict=True)
        ]

    def candidate_log_probs(self, model: Any, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        """Compute the log-probs of the micro-batches' column CANDIDATES under a model.

        Returns:
            For each micro-batch float32 [T, k], 0 where loss_mask is 0 or there is no candidate; on all ranks.
        """
        width = max((batch.columns[CANDIDATES].shape[1] for batch in micro_batches), default=0)
        return self._per_token(model, micro_batches, lambda *last: self.token_logprobs(*last).candidates, width)

    def values(self, model: Any, micro_batches: Sequence[PackedMicroBatch]) -> list[NDArray[np.float32]]:
        """Compute a critic's values for the tokens with loss_mask 1, each from the hidden state of the token before.

        Returns:
            For each micro-batch float32 [T], 0 where loss_mask is 0; on all ranks.
        """
        return self._per_token(model, micro_batches, self.token_values)

    def _per_token(
        self,
        model: Any,
        micro_batches: Sequence[PackedMicroBatch],
        compute: TokenFunction,
        width: int | None = None,
    ) -> list[NDArray[np.float32]]:
        """Return the values that `compute` gives to trained tokens, and 0 for others.

        For each micro-batch of T tokens an array float32 [T], or [T, width].
        """
        shape = () if width is None else (width,)
        results = [np.zeros((len(batch.tokens), *shape), np.float32) for batch in micro_batches]
        if not micro_batches:
            return results
        flat = torch.zeros(sum(int(b.loss_mask.sum()) for b in micro_batches), *shape, device=self.world.device)
        with torch.no_grad():
            outputs = self.run(model, micro_batches, partial(_evaluate, compute), forward_only=True)
        begin = 0
        for batch, output in zip(micro_batches, outputs, strict=False):
            if len(output["indices"]):  # padding may have another width
                flat[begin + output["indices"]] = output["values"]
            begin += int(batch.loss_mask.sum())
        if outputs and self.world.cp_size > 1:
            dist.all_reduce(flat, group=parallel_state.get_context_parallel_group())
        if self.world.pp_size > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        values, begin = flat.cpu().numpy(), 0
        for batch, result in zip(micro_batches, results, strict=True):
            places = np.flatnonzero(batch.loss_mask)
            result[places] = values[begin : begin + len(places)]
            begin += len(places)
        return results

    def run(
        self,
        model: Any,
        micro_batches: Sequence[PackedMicroBatch],
        output: OutputFunction,
        *,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        """Run Megatron's schedule over micro-batches, with a backward pass unless `forward_only`.

        Args:
            model: the model.
            micro_batches: the micro-batches.
            output: computes the last stage's output.
            forward_only: whether to skip the backward pass.

        Returns:
            The values that `output` reports for each micro-batch, including those that `padded` appends; empty on all
            stages except the last.
        """
        policy: StageModel = getattr(model, "module", model)
        micro_batches = self.padded(micro_batches)
        if self._offload is not None:
            self._offload.reset()

        def forward(batches: Iterator[DeviceBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(batches)
            hidden = model(batch.tokens, batch.rotary, batch.layout, batch.media)
            part: PolicyModel = getattr(model, "module", model)
            return hidden, partial(output, part.output_weight(), batch) if part.post_process else None

        fed, models, chunks = self._fed(micro_batches), [model], None
        if isinstance(policy, InterleavedModel):
            models, chunks = policy.parts, len(policy.parts)
            policy.config.microbatch_group_size_per_vp_stage = group_size(len(micro_batches), self.world.pp_size)
        reported: list[dict[str, Tensor]] = get_forward_backward_func(self.world.pp_size, chunks)(
            forward_step_func=forward,
            data_iterator=fed if chunks is None else list(tee(fed, chunks)),
            model=models,
            num_microbatches=len(micro_batches),
            seq_length=0,  # unused: `StageExchange` knows the shapes
            micro_batch_size=1,
            forward_only=forward_only,
            **self._exchange(policy.config, micro_batches),
        )
        return reported

    def padded(self, micro_batches: Sequence[PackedMicroBatch]) -> Sequence[PackedMicroBatch]:
        """Append empty micro-batches if the pipeline's schedule needs more.

        With several chunks, Megatron's schedule needs at least one micro-batch per stage.
        """
        missing = self.world.pp_size - len(micro_batches)
        if self.world.layout.pipeline_chunks == 1 or missing <= 0:
            return micro_batches
        return [*micro_batches, *[empty_micro_batch(micro_batches[0].columns)] * missing]

    def _exchange(self, config: ModelParallelConfig, micro_batches: Sequence[PackedMicroBatch]) -> dict[str, Any]:
        """Return arguments of Megatron's schedule for exchanging hidden states between stages; {} for one stage."""
        if self.world.pp_size == 1:
            return {}
        ranks, hidden = self.world.cp_size * self.world.tp_size, self.architecture.hidden_size
        shapes = [[-(-len(batch.tokens) // ranks), 1, hidden] for batch in micro_batches]
        exchange = StageExchange(config, shapes)
        return {"p2p_communicator": exchange, "pg_collection": pipeline_groups()}

    def _fed(self, micro_batches: Sequence[PackedMicroBatch]) -> Iterator[DeviceBatch]:
        for number, batch in enumerate(micro_batches, 1):
            if len(micro_batches) > 1:
                self.report(f"micro-batch {number} of {len(micro_batches)}")
            yield self._to_device(batch)

    def token_logprobs(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> TokenLogprobs:
        """Return log-probs and entropies of the trained tokens, and log-probs of the column CANDIDATES, if present.

        Logits of other tokens are not computed. See `OutputFunction` for the arguments.
        """
        rows, candidates = self._rows(batch, hidden), batch.columns.get(CANDIDATES)
        return token_logprobs(
            rows,
            weight,
            batch.targets,
            batch.temperature,
            self.vocab,
            candidates=candidates,
            float32_logits=self._float32_logits,
        )

    def _rows(self, batch: DeviceBatch, hidden: Tensor) -> Tensor:
        """Return the hidden states from which the trained tokens are predicted, [N trained tokens, hidden]."""
        sequence_parallel = self.megatron_config.sequence_parallel
        if sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        rows = hidden.squeeze(1).index_select(0, batch.predicting)
        if self.vocab.group is not None and not sequence_parallel:
            rows = tensor_parallel.copy_to_tensor_model_parallel_region(rows)
        return rows

    def token_values(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> Tensor:
        """Return the critic's values for the trained tokens, from the hidden states that predict them, float32 [N].

        The sampling temperature doesn't matter. See `OutputFunction` for the arguments; the weight is [1, hidden].
        """
        if self.megatron_config.sequence_parallel:
            # Every rank computes all values from the whole weight, so each has the whole gradient of its slice.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows = hidden.squeeze(1).index_select(0, batch.predicting)
        return rows.float() @ weight[0].float()


def _evaluate(compute: TokenFunction, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> StageOutput:
    """Return a `StageOutput` with loss 0 that reports the values of `compute` and the trained tokens' indices."""
    found = {"values": compute(weight, batch, hidden), "indices": batch.trained_indices}
    return hidden.new_zeros(()), no_tokens(), found


def _read_vision(folder: Path) -> VisionModel:
    try:
        return read_vision(folder)
    except DataError as error:
        raise ModelError(str(error)) from error


def no_tokens() -> Tensor:
    """Return a zero for the token count of a `StageOutput`, which is not used."""
    return torch.zeros((), dtype=torch.int)


def _vocab_shard(vocab_size: int, world: World) -> VocabShard:
    rows = padded_vocab(vocab_size, world.tp_size) // world.tp_size
    start = rows * world.tp_rank
    group = parallel_state.get_tensor_model_parallel_group() if world.tp_size > 1 else None
    return VocabShard(start=start, size=min(rows, vocab_size - start), group=group)
