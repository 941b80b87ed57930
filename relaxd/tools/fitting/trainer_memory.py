"""Bytes of each pipeline stage of a trained or a frozen model on a GPU: weights, optimizer state, gradients and their
buckets.

The buckets are Megatron's, which fills one after the other, from the last parameter to the first, each with at least
LEAST_PARAMETERS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from relaxd.models.layouts import Layout, Parameters, layer_parameters, stage_parameters
from relaxd.models.shape import ModelShape
from relaxd.tools.fitting.activations import (
    LogitBytes,
    MicroBatch,
    backward_work,
    forward_work,
    logit_bytes,
    saved_by_part,
)

LEAST_PARAMETERS = 40_000_000
"""Minimum number of parameters in a gradient bucket, except the last; with more than 40 data-parallel ranks the minimum
is a million per rank."""


def buckets_in_memory(
    shape: ModelShape, layout: Layout, stage: int, *, critic: bool = False, least: int | None = None
) -> int:
    """Return the maximum bytes of gradient buckets that a rank holds at the same time, with sharded gradients.

    Dense parameters and experts each have two neighbouring buckets, because a layer may span both, and with overlapped
    reduction a third that is being reduced. The bucket of a tied embedding exists all the time, because its gradients
    come at the beginning and at the end of a pass.

    Args:
        shape: the model.
        layout: the model's division among ranks.
        stage: the pipeline stage.
        critic: True if the model is a critic.
        least: minimum number of parameters of a bucket; None: Megatron's choice.
    """
    least = least or max(LEAST_PARAMETERS, 1_000_000 * layout.data)
    dense, experts = _parameters(shape, layout, stage, critic=critic)
    neighbours, total = 3 if layout.overlap_grad_reduce else 2, 0
    if layout.data * layout.context > 1:
        buckets = _buckets(dense, least)
        all_the_time = buckets.pop() if shape.tied and layout.pipeline == 1 and not critic else 0
        total += _largest(buckets, neighbours) + all_the_time
    if layout.expert_data > 1:
        total += _largest(_buckets(experts, least), neighbours)
    return 4 * total


def _parameters(shape: ModelShape, layout: Layout, stage: int, *, critic: bool) -> tuple[list[int], list[int]]:
    """Return the element counts of a pipeline stage's dense parameter tensors, and of its experts' tensors, on a rank.

    The small tensors of a layer are counted as one tensor.
    """
    tensor, hidden, experts = layout.tensor, shape.hidden, shape.experts
    ffn = shape.ffn if experts is None else experts.shared_ffn
    mlp = [2 * hidden * ffn // tensor, hidden * ffn // tensor]
    attention = [shape.query, (2 if shape.output_gate else 1) * shape.query + 2 * shape.kv]
    delta_net = [] if shape.delta_net is None else [shape.delta_net.values, shape.delta_net.projected]
    dense, of_experts = [], []
    for layer in layout.layers_of_stage(shape, stage):
        widths = delta_net if shape.has_delta_net(layer) else attention
        matrices = [*(width * hidden // tensor for width in widths), *mlp]
        of_layer, own = layer_parameters(shape, layout, layer)
        dense += [of_layer - sum(matrices), *matrices]
        of_experts += [own * 2 // 3, own // 3]
    vocabulary = -(-shape.vocabulary // tensor) * hidden
    first = [vocabulary] if stage == 0 else []
    rest = stage_parameters(shape, layout, stage, critic=critic).dense - sum(dense) - sum(first)
    return [*first, *dense, rest], of_experts


def _buckets(parameters: Sequence[int], least: int) -> list[int]:
    """Divide parameter tensors into gradient buckets, from the last tensor to the first, and return the buckets'
    numbers of parameters."""
    found, size = [], 0
    for count in reversed(parameters):
        size += count
        if size >= least:
            found.append(size)
            size = 0
    return [*found, size] if size or not found else found


def _largest(buckets: Sequence[int], neighbours: int) -> int:
    return max((sum(buckets[begin : begin + neighbours]) for begin in range(len(buckets))), default=0)


PROCESS_BYTES = 2 << 30
"""Assumed GPU bytes of a rank's process in addition to its tensors: CUDA's context, cuBLAS's and cuDNN's workspaces,
kernels, NCCL."""
USABLE_SHARE = 0.95
"""Share of a GPU's memory that can be filled; the rest are gaps that the allocator leaves. Of two runs that needed
0.955 of an H200, one failed (docs/benchmarks.md, 4 B without recompute) and one succeeded (1.7 B, 57,344 tokens)."""

Bytes = dict[str, int]
"""Bytes of memory, disk or messages, by purpose, such as {"weights": ..., "gradients": ...}."""


@dataclass(frozen=True)
class TrainedModelShape:
    """Shape of a model that a rank trains, and where and how its optimizer's state is kept."""

    name: str
    """The trained model: "" for the policy, or "critic"."""
    shape: ModelShape
    offload: bool
    """True if the state of the model's optimizer is in host memory, not on the GPU."""
    moment_bytes: float = 8
    """Bytes per parameter of the optimizer's two moments together."""
    trains_vision: bool = False
    """True if the model's vision tower is trained, at least in part."""


def weights_and_state(model: TrainedModelShape, layout: Layout, stage: int, element: int) -> Bytes:
    """Return the bytes that a rank holds of a trained model at all times: weights, gradients and optimizer state.

    Gradients are in float32. The optimizer's state (float32 main weights, if the model computes in bfloat16, and two
    moments) and sharded gradients are divided among the ranks that have the same parameters.
    """
    own = stage_parameters(model.shape, layout, stage, critic=model.name == "critic")
    prefix = f"{model.name} " if model.name else ""
    trained = own.trained(vision=model.trains_vision)
    sharded = sharded_parameters(trained, layout)
    gradients = 4 * (sharded if layout.shard_gradients else trained.all)
    found = {f"{prefix}weights": own.all * element, f"{prefix}gradients": gradients}
    if not model.offload:
        if element < 4:
            found[f"{prefix}main weights"] = 4 * sharded
        found[f"{prefix}moments"] = int(model.moment_bytes * sharded)
    return found


def sharded_parameters(own: Parameters, layout: Layout) -> int:
    """Return the number of parameters of which a rank holds the optimizer state, and the gradients if they are
    sharded."""
    return own.dense // (layout.data * layout.context) + own.experts // layout.expert_data


def in_flight(layout: Layout, stage: int) -> Fraction:
    """Return the number of micro-batches whose activations a pipeline stage holds at once, in Megatron's 1F1B schedule.

    A fraction, because a stage with several chunks holds a micro-batch's activations for some of its chunks. Before its
    first backward pass, such a stage takes one micro-batch per stage through each chunk except the last, and then two
    per later stage. The real number is higher if the micro-batches aren't a multiple of the stages.
    """
    chunks, behind = layout.pipeline_chunks, layout.pipeline - stage - 1
    if chunks == 1:
        return Fraction(behind + 1)
    return Fraction((chunks - 1) * layout.pipeline + 2 * behind + 1, chunks)


def training_bytes(
    shape: ModelShape, layout: Layout, stage: int, batch: MicroBatch, gpu_bytes: int, *, critic: bool = False
) -> Bytes:
    """Return the peak bytes that training passes need on a rank of a pipeline stage: activations, logits, work space.

    A critic has no logits.
    """
    parts = saved_by_part(shape, layout, batch, stage)
    of_one_layer = parts.pop("recomputed layer", 0)
    found = _on_gpu(parts, layout, layout.stage_layers(shape), in_flight(layout, stage))
    in_layers = of_one_layer + backward_work(shape, layout, batch)
    logits = LogitBytes(0, 0)
    if stage == layout.pipeline - 1 and not critic:
        logits = logit_bytes(shape, layout, batch, gpu_bytes)
    # Logits are freed before the layers' backward pass needs the room.
    if logits.kept + logits.work >= in_layers:
        return {**found, "logits": logits.kept, "work space": logits.work}
    return {**found, "recomputed layer": of_one_layer, "work space": in_layers - of_one_layer}


def _on_gpu(parts: Bytes, layout: Layout, layers: int, micro_batches: Fraction) -> Bytes:
    """Return the bytes of activations that stay on a GPU, by part.

    They are those that exceed layout.activations_on_host, and at least about two layers'.
    """
    total = int(sum(parts.values()) * micro_batches)
    moved = min(layout.activations_on_host, max(0, total - 2 * sum(parts.values()) // layers))
    return {
        f"activations: {part}": size * micro_batches * (total - moved) // max(total, 1) for part, size in parts.items()
    }


def trainer_stage(
    models: Sequence[TrainedModelShape],
    frozen: Sequence[ModelShape],
    layout: Layout,
    stage: int,
    batch: MicroBatch,
    gpu_bytes: int,
    *,
    bucket_bytes: int = 0,
) -> Bytes:
    """Return the peak bytes of tensors on a trainer's rank of a pipeline stage, by purpose.

    Args:
        models: the policy, and a critic if any. They train one after the other, so activations count once.
        frozen: further models on the rank, which aren't trained.
        layout: the division of each model among ranks.
        stage: the pipeline stage.
        batch: the largest micro-batch.
        gpu_bytes: total memory of the GPU, in bytes.
        bucket_bytes: bytes of a weight bucket; two exist at a time, because one is gathered while another is sent.
    """
    found: Bytes = {}
    for model in models:
        found |= weights_and_state(model, layout, stage, batch.element)
    if frozen:
        found["frozen models"] = sum(stage_parameters(shape, layout, stage).all for shape in frozen) * batch.element
    if bucket_bytes:
        found["buckets of weights"] = 2 * bucket_bytes
    # A critic has its backward pass after the policy's.
    if layout.shard_gradients and (buckets := buckets_in_memory(models[0].shape, layout, stage)):
        found["buckets of gradients"] = buckets
    return found | training_bytes(models[0].shape, layout, stage, batch, gpu_bytes)


def critic_stage(model: TrainedModelShape, layout: Layout, stage: int, batch: MicroBatch, gpu_bytes: int) -> Bytes:
    """Return the peak bytes of tensors on a critic service's rank of a pipeline stage, by purpose."""
    state = weights_and_state(model, layout, stage, batch.element)
    own = {name.removeprefix(f"{model.name} "): size for name, size in state.items()}
    if layout.shard_gradients and (buckets := buckets_in_memory(model.shape, layout, stage, critic=True)):
        own["buckets of gradients"] = buckets
    return own | training_bytes(model.shape, layout, stage, batch, gpu_bytes, critic=True)


def frozen_stage(shapes: Sequence[ModelShape], layout: Layout, stage: int, batch: MicroBatch) -> Bytes:
    """Return the bytes of tensors on a rank of a service for frozen models: the weights of all, and work space."""
    return {
        "weights": sum(stage_parameters(shape, layout, stage).all for shape in shapes) * batch.element,
        "work space": max(forward_work(shape, layout, batch) for shape in shapes),
    }


class FitError(ValueError):
    """A setting makes it impossible to compute the memory. The message has the setting, its value and what is valid."""


@dataclass(frozen=True)
class Hardware:
    """Memory and number of the GPUs on which a run is to fit."""

    gpu_bytes: int
    """Total memory of each GPU, in bytes."""
    gpus_per_node: int

    @property
    def room(self) -> int:
        """Bytes of each GPU's memory that a run can fill."""
        return int(USABLE_SHARE * self.gpu_bytes)

    def check(self, setting: str, gpus: int, nodes: int = 1) -> None:
        """Raise FitError if `setting` asks for more GPUs than `nodes` nodes have."""
        if gpus <= self.gpus_per_node * nodes:
            return
        place = "a replica's GPUs are on one node, which has"
        if nodes > 1:
            place = f"they are on trainer.hosts = {nodes} nodes, each of which has"
        raise FitError(f"{setting} is {gpus}: {place} {self.gpus_per_node} (--gpus-per-node)")


@dataclass(frozen=True)
class Held:
    """Peak memory that a role needs on a GPU, and the memory that there is."""

    role: str
    place: str
    """Place or time of the role's peak, such as "stage 1" or the turn "train"; "" if all its GPUs are alike."""
    bytes: Bytes
    room: int
    """Bytes of the GPU's memory that the role may fill."""

    @property
    def total(self) -> int:
        """Peak bytes on the GPU, all purposes together."""
        return sum(self.bytes.values())

    @property
    def fits(self) -> bool:
        """True if the role's peak doesn't exceed the memory that it may fill."""
        return self.total <= self.room
