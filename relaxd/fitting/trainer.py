"""Bytes of each pipeline stage of a trained or a frozen model on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from relaxd.fitting.activations import MicroBatch, backward_work, saved_by_part
from relaxd.fitting.gradient_buckets import buckets_in_memory
from relaxd.fitting.logits import LogitBytes, forward_work, logit_bytes
from relaxd.models.layouts import Layout, Parameters, stage_parameters
from relaxd.models.shape import ModelShape

PROCESS_BYTES = 2 << 30
"""Bytes of a process beside its tensors: CUDA's context, cuBLAS's and cuDNN's workspaces, kernels, NCCL. Assumed."""
USABLE_SHARE = 0.95
"""Share of a GPU's memory that tensors can fill: the allocator leaves gaps. A run that needed 0.955 of an H200 failed
(docs/benchmarks.md, 4 B without recompute), and one that needed as much succeeded (1.7 B, 57,344 tokens)."""

Bytes = dict[str, int]
"""Bytes by what they are for."""


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


def weights_and_state(model: TrainedModelShape, layout: Layout, stage: int, element: int) -> Bytes:
    """Return the bytes that a rank holds of a trained model all the time.

    Gradients are in float32. The optimizer's state is divided among the ranks that have the same parameters: float32
    main weights, if the model computes in bfloat16, and two moments. So are gradients that are sharded.
    """
    own = stage_parameters(model.shape, layout, stage, critic=model.name == "critic")
    prefix = f"{model.name} " if model.name else ""
    sharded = sharded_parameters(own, layout)
    gradients = 4 * (sharded if layout.shard_gradients else own.all)
    found = {f"{prefix}weights": own.all * element, f"{prefix}gradients": gradients}
    if not model.offload:
        if element < 4:
            found[f"{prefix}main weights"] = 4 * sharded
        found[f"{prefix}moments"] = int(model.moment_bytes * sharded)
    return found


def sharded_parameters(own: Parameters, layout: Layout) -> int:
    """Return the parameters whose optimizer state, and shard of the gradients, a rank holds."""
    return own.dense // (layout.data * layout.context) + own.experts // layout.expert_data


def in_flight(layout: Layout, stage: int) -> Fraction:
    """Return the micro-batches whose activations a stage holds at once, in Megatron's one-forward-one-backward.

    Before a stage with several chunks goes backward, it takes as many micro-batches as there are stages through each
    chunk but the last, and then two for each stage after it. If the micro-batches of a schedule aren't a multiple of
    the stages, it holds more.
    """
    chunks, behind = layout.pipeline_chunks, layout.pipeline - stage - 1
    if chunks == 1:
        return Fraction(behind + 1)
    return Fraction((chunks - 1) * layout.pipeline + 2 * behind + 1, chunks)


def training_bytes(
    shape: ModelShape, layout: Layout, stage: int, batch: MicroBatch, gpu_bytes: int, *, critic: bool = False
) -> Bytes:
    """Return the bytes of activations and of the backward pass on a rank of a stage, when they are the most.

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
    """Return the activations that stay on a GPU: with offload what has no room on the host, and about two layers'."""
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
    """Return the peak memory of tensors on a rank of a critic's replica."""
    state = weights_and_state(model, layout, stage, batch.element)
    own = {name.removeprefix(f"{model.name} "): size for name, size in state.items()}
    if layout.shard_gradients and (buckets := buckets_in_memory(model.shape, layout, stage, critic=True)):
        own["buckets of gradients"] = buckets
    return own | training_bytes(model.shape, layout, stage, batch, gpu_bytes, critic=True)


def frozen_stage(shapes: Sequence[ModelShape], layout: Layout, stage: int, batch: MicroBatch) -> Bytes:
    """Return the memory of a rank of a frozen model's replica, all of its models together."""
    return {
        "weights": sum(stage_parameters(shape, layout, stage).all for shape in shapes) * batch.element,
        "work space": max(forward_work(shape, layout, batch) for shape in shapes),
    }
