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
"""Minimum number of parameters of a bucket except the last; one million per data-parallel rank, if that is more."""


def buckets_in_memory(
    shape: ModelShape, layout: Layout, stage: int, *, critic: bool = False, least: int | None = None
) -> int:
    """Return the maximum bytes of the buckets that a rank holds at once.

    Dense parameters and experts each have two neighbouring buckets, because a layer may span both, and with overlapped
    reduction a third that is being reduced. The bucket of a tied embedding exists all the time, because its gradients
    come at the beginning and at the end of a pass.

    Args:
        shape: the model.
        layout: its division among ranks.
        stage: the pipeline stage.
        critic: whether the model is a critic.
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
    """Return the sizes of a stage's dense parameters, and of its experts' parameters.

    The small parameters of a layer count as one.
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
    """Return the sizes of buckets, the first of which has the last parameters."""
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
"""Assumed bytes of a process beside its tensors: CUDA's context, cuBLAS's and cuDNN's workspaces, kernels, NCCL."""
USABLE_SHARE = 0.95
"""Share of a GPU's memory that tensors can fill: the allocator leaves gaps. A run that needed 0.955 of an H200 failed
(docs/benchmarks.md, 4 B without recompute), and one that needed as much succeeded (1.7 B, 57,344 tokens)."""

Bytes = dict[str, int]
"""Bytes by purpose."""


@dataclass(frozen=True)
class TrainedModelShape:
    """A model that a rank trains."""

    name: str
    """"" for the policy, or "critic"."""
    shape: ModelShape
    offload: bool
    """True if its optimizer's state is in the host's memory."""
    moment_bytes: float = 8
    """Bytes of the two moments of a parameter."""
    trains_vision: bool = False
    """True if its vision tower is trained, or a part of that."""


def weights_and_state(model: TrainedModelShape, layout: Layout, stage: int, element: int) -> Bytes:
    """Return the bytes that a rank holds of a trained model all the time.

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
    """Return the number of parameters whose optimizer state and sharded gradients a rank holds."""
    return own.dense // (layout.data * layout.context) + own.experts // layout.expert_data


def in_flight(layout: Layout, stage: int) -> Fraction:
    """Return the number of micro-batches whose activations a stage holds at once, in Megatron's 1F1B schedule.

    Before its first backward pass, a stage with several chunks takes one micro-batch per stage through each chunk
    except the last, and then two per later stage. It holds more if a schedule's micro-batches aren't a multiple of the
    stages.
    """
    chunks, behind = layout.pipeline_chunks, layout.pipeline - stage - 1
    if chunks == 1:
        return Fraction(behind + 1)
    return Fraction((chunks - 1) * layout.pipeline + 2 * behind + 1, chunks)


def training_bytes(
    shape: ModelShape, layout: Layout, stage: int, batch: MicroBatch, gpu_bytes: int, *, critic: bool = False
) -> Bytes:
    """Return the peak bytes of activations and of the backward pass on a rank of a stage.

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
    """Return the activations that stay on a GPU: those above the host's limit, and at least about two layers'."""
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
    """Return the peak memory of tensors on a rank of a stage.

    Args:
        models: the policy, and a critic if any, which take turns: each has the activations of one pass.
        frozen: models beside them that aren't trained.
        layout: the division of each model.
        stage: the stage.
        batch: the largest micro-batch.
        gpu_bytes: memory of the GPU.
        bucket_bytes: bytes of a weight bucket; the next one is gathered while one is sent.
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
    """Return the peak memory of tensors on one rank of a critic replica."""
    state = weights_and_state(model, layout, stage, batch.element)
    own = {name.removeprefix(f"{model.name} "): size for name, size in state.items()}
    if layout.shard_gradients and (buckets := buckets_in_memory(model.shape, layout, stage, critic=True)):
        own["buckets of gradients"] = buckets
    return own | training_bytes(model.shape, layout, stage, batch, gpu_bytes, critic=True)


def frozen_stage(shapes: Sequence[ModelShape], layout: Layout, stage: int, batch: MicroBatch) -> Bytes:
    """Return the memory of one rank of a replica that serves frozen models: the weights of all, and the work space."""
    return {
        "weights": sum(stage_parameters(shape, layout, stage).all for shape in shapes) * batch.element,
        "work space": max(forward_work(shape, layout, batch) for shape in shapes),
    }


class FitError(ValueError):
    """A setting makes the computation impossible. The message names it, its value, and what would be right."""


@dataclass(frozen=True)
class Hardware:
    """The GPUs of a run."""

    gpu_bytes: int
    """Memory of one GPU in bytes."""
    gpus_per_node: int

    @property
    def room(self) -> int:
        """Bytes of a GPU that can be filled."""
        return int(USABLE_SHARE * self.gpu_bytes)

    def check(self, setting: str, gpus: int, nodes: int = 1) -> None:
        """Raise FitError if a role needs more GPUs than its nodes have."""
        if gpus <= self.gpus_per_node * nodes:
            return
        place = "a replica's GPUs are on one node, which has"
        if nodes > 1:
            place = f"they are on trainer.hosts = {nodes} nodes, each of which has"
        raise FitError(f"{setting} is {gpus}: {place} {self.gpus_per_node} (--gpus-per-node)")


@dataclass(frozen=True)
class Held:
    """Peak bytes of a GPU in one role."""

    role: str
    place: str
    """Name of the GPU, or of the turn, that has this peak; "" if all are equal."""
    bytes: Bytes
    room: int
    """Bytes that the GPU may hold."""

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return sum(self.bytes.values())

    @property
    def fits(self) -> bool:
        """True if the bytes fit."""
        return self.total <= self.room
