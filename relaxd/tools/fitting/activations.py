"""Activations: the tensors, logits included, that a forward pass keeps for the backward pass.

Triton's fused kernels (bfloat16 on GPUs) save fewer tensors than torch's operations (float32). Recompute "selective"
recomputes some tensors in the backward pass, "full" all except a layer's input.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from relaxd.models.layouts import Layout
from relaxd.models.shape import DeltaNetSizes, ModelShape

Part = Literal["attention", "MLP", "experts", "norms"]


@dataclass(frozen=True)
class MicroBatch:
    """Size of a run's largest micro-batch, summed over the ranks that share it, and how the trainer computes it."""

    tokens: int
    """Number of tokens in the micro-batch's row of packed sequences."""
    slots: int
    """Number of tokens that attention processes; more than `tokens` if a shared prompt is repeated for each sample."""
    fused: bool
    """True if Triton's fused kernels compute the layers, False if torch's operations do."""
    element: int
    """Bytes per element of activations and weights: 2 or 4."""
    float32_logits: bool = False
    """True if logits are in float32 even if activations aren't."""

    @property
    def logit_bytes(self) -> int:
        """Bytes per logit."""
        return 4 if self.float32_logits else self.element


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a layer's forward pass saves for the backward pass."""

    name: str
    part: Part
    size: int
    """Bytes of the tensor, summed over all ranks that share the micro-batch."""
    recomputed: bool = False
    """True if the backward pass recomputes the tensor with recompute = "selective"."""


def layer_tensors(
    shape: ModelShape, layout: Layout, batch: MicroBatch, delta_net: DeltaNetSizes | None = None
) -> list[SavedTensor]:
    """Return the tensors that a layer saves for the backward pass if nothing is recomputed.

    `delta_net` has the sizes of the layer's gated delta net; None: the layer has attention.
    """
    attention = _attention(shape, layout, batch) if delta_net is None else _delta_net(shape, delta_net, batch)
    return [*attention, *_mlp(shape, layout, batch)]


def _delta_net(shape: ModelShape, sizes: DeltaNetSizes, batch: MicroBatch) -> Iterator[SavedTensor]:
    """Yield the tensors that a gated delta net saves for the backward pass, which recomputes those between the
    projections."""
    yield from _norm(shape, batch, "attention")
    yield SavedTensor("projection", "attention", sizes.projected * batch.tokens * batch.element)
    yield SavedTensor("output", "attention", sizes.values * batch.tokens * batch.element)


def _attention(shape: ModelShape, layout: Layout, batch: MicroBatch) -> Iterator[SavedTensor]:
    division = layout.division(shape)
    copied = shape.kv * division.copies
    gathered = copied * division.gathering  # at most: the last tokens' rank needs the keys of all
    tokens, slots = batch.tokens * batch.element, batch.slots * batch.element
    yield from _norm(shape, batch, "attention")
    yield SavedTensor("projection", "attention", (shape.query + 2 * copied) * tokens)
    if shape.qk_norm and not batch.fused:
        yield SavedTensor(
            "queries and keys before their norms' weights", "attention", (2 * shape.query + copied) * tokens
        )
    separate = (
        batch.fused or batch.slots > batch.tokens or division.gathering > 1
    )  # otherwise values are a view of the projection
    yield SavedTensor("rotated heads", "attention", (shape.query + (1 + separate) * gathered) * slots, recomputed=True)
    yield SavedTensor("output", "attention", shape.query * slots)
    yield SavedTensor("softmax statistics", "attention", 4 * shape.heads * batch.slots)
    if shape.output_gate:
        yield SavedTensor("gate and gated output", "attention", 2 * shape.query * tokens)
    if batch.slots > batch.tokens:
        yield SavedTensor("output in the row's order", "attention", shape.query * tokens, recomputed=True)


def _norm(shape: ModelShape, batch: MicroBatch, of: str) -> Iterator[SavedTensor]:
    size = shape.hidden * batch.tokens * batch.element
    yield SavedTensor(f"residual before {of}", "norms", size)
    if not batch.fused:
        yield SavedTensor(f"norm before {of}, without its weight", "norms", size)
    yield SavedTensor(f"norm before {of}", "norms", size, recomputed=True)


def _mlp(shape: ModelShape, layout: Layout, batch: MicroBatch) -> Iterator[SavedTensor]:
    yield from _norm(shape, batch, "MLP")
    experts = shape.experts
    if experts is None:
        yield from _swiglu(shape.ffn, batch)
        return
    rows = batch.tokens * experts.per_token
    yield SavedTensor("router", "experts", 4 * experts.count * batch.tokens + 32 * rows)
    if layout.expert > 1:
        yield SavedTensor("rows from other ranks", "experts", rows * shape.hidden * batch.element)
    elif layout.expert_tensor > 1:
        gathered = layout.expert_tensor * batch.tokens * shape.hidden * batch.element
        yield SavedTensor("tokens of all tensor-parallel ranks", "experts", gathered)
    yield SavedTensor("gate and up", "experts", 2 * rows * experts.ffn * batch.element, recomputed=True)
    if experts.shared_ffn:
        yield from _swiglu(experts.shared_ffn, batch)
        yield SavedTensor("shared expert's output", "experts", batch.tokens * shape.hidden * batch.element)


def _swiglu(ffn: int, batch: MicroBatch) -> Iterator[SavedTensor]:
    size = batch.tokens * ffn * batch.element
    yield SavedTensor("gate and up", "MLP", 2 * size, recomputed=True)
    if not batch.fused:
        yield SavedTensor("silu(gate)", "MLP", size)
    yield SavedTensor("input of the second product", "MLP", size, recomputed=True)


def saved_by_part(shape: ModelShape, layout: Layout, batch: MicroBatch, stage: int = 0) -> dict[str, int]:
    """Return the bytes of activations that a rank keeps for one micro-batch in all layers of its stage, by part.

    With recompute = "full", there is a further part "recomputed layer": the tensors of one layer, which the backward
    pass recomputes.
    """
    recomputed = layout.recomputed_layers(shape, stage)
    layer_input, recomputed_layer = shape.hidden * batch.tokens * batch.element, 0
    found: dict[str, int] = {}
    stage_layers = layout.layers_of_stage(shape, stage)
    for sizes in (None,) if shape.delta_net is None else (None, shape.delta_net):
        alike = [n for n, layer in enumerate(stage_layers) if shape.has_delta_net(layer) == (sizes is not None)]
        own_recomputed = sum(number < recomputed for number in alike)
        tensors = layer_tensors(shape, layout, batch, sizes)
        for tensor in tensors:
            again = layout.recompute == "full" or tensor.recomputed
            kept = len(alike) - own_recomputed if again else len(alike)
            found[tensor.part] = found.get(tensor.part, 0) + kept * tensor.size
        if own_recomputed:
            recomputed_layer = max(recomputed_layer, sum(tensor.size for tensor in tensors) - layer_input)
    if layout.recompute == "full" and recomputed:
        found["norms"] = found.get("norms", 0) + recomputed * layer_input
        found["recomputed layer"] = recomputed_layer
    return {part: size // layout.slices for part, size in found.items()}


def backward_work(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """Return the peak bytes of temporary gradients on a rank during the backward pass of one layer."""
    hidden, experts = shape.hidden, shape.experts
    attention = 2 * hidden + 2 * (shape.query + 2 * shape.kv)
    if experts is None:
        mlp = 3 * hidden + 3 * shape.ffn
    else:
        mlp = 3 * hidden + experts.per_token * (2 * hidden + 4 * experts.ffn) + 3 * experts.shared_ffn
    if layout.recompute == "selective":
        mlp += hidden + (3 * shape.ffn if experts is None else 2 * experts.per_token * experts.ffn)
    widest = max(attention * batch.slots, mlp * batch.tokens) * batch.element
    return max(widest, delta_net_work(shape, batch)) // layout.slices


DELTA_CHUNK = 64
"""Number of tokens that gated delta nets process as a chunk; equals the trainer's
(services/trainer/transformer/sequence_layout.py)."""


def delta_net_work(shape: ModelShape, batch: MicroBatch) -> int:
    """Return the bytes of a gated delta net's float32 tensors between its projections; 0 if the model has none.

    Per value head these are three chunk matrices, nine key-sized and nine value-sized vectors per token (half of them
    around the convolution), and two states per chunk. Gradients are assumed to add half of the sum.
    """
    if (sizes := shape.delta_net) is None:
        return 0
    state = sizes.key_size * sizes.value_size
    of_token = 3 * DELTA_CHUNK + 9 * (sizes.key_size + sizes.value_size) + 2 * state // DELTA_CHUNK
    return 4 * sizes.value_heads * of_token * batch.tokens * 3 // 2


CHUNK_BYTES = 1 << 30
"""Bytes of the logits that the trainer computes at a time on a GPU; equals CHUNK_BYTES of its learner/logprobs.py."""
KEPT_SHARE = 1 / 24
"""Maximum share of a GPU's memory for logits that are kept for the backward pass; equals KEPT_SHARE there."""


@dataclass(frozen=True)
class LogitBytes:
    """Bytes on a rank of the last pipeline stage for logits and the tensors around the output layer."""

    kept: int
    """Bytes of the logits that are kept for the backward pass."""
    work: int
    """Bytes of temporary tensors: chunks of logits that aren't kept, the hidden states before the output layer and
    their gradient."""


def logit_bytes(shape: ModelShape, layout: Layout, batch: MicroBatch, gpu_bytes: int) -> LogitBytes:
    """Return the bytes that a rank needs for logits to compute log-probs, if all tokens of the micro-batch are
    trained."""
    width = -(-shape.vocabulary // layout.tensor) * batch.logit_bytes
    tokens = batch.tokens // layout.context
    chunk = _chunk_tokens(width)
    kept_chunks = int(gpu_bytes * KEPT_SHARE) // (chunk * width)
    kept = min(tokens, kept_chunks * chunk)
    # torch's operations hold three float32 copies of a chunk, the fused kernels one.
    copies = 1 if batch.fused else 3
    chunks = copies * min(chunk, tokens) * width if tokens > kept or not batch.fused else 0
    if batch.fused and batch.logit_bytes > batch.element:
        chunks += min(chunk, tokens) * width * batch.element // batch.logit_bytes  # their gradient, rounded
    # Without tensor parallelism: the last residual, the rows that predict a token, their gradient.
    states = (1 + 2 * layout.tensor) * shape.hidden * batch.tokens * batch.element // layout.slices
    return LogitBytes(kept * width, chunks + states)


def forward_work(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """Return the peak bytes of a forward pass without gradients on a rank: one layer's tensors and a chunk of
    logits."""
    width = -(-shape.vocabulary // layout.tensor) * batch.logit_bytes
    experts = shape.experts
    inner = 3 * shape.ffn if experts is None else experts.per_token * (shape.hidden + 3 * experts.ffn)
    layer = max((3 * shape.hidden + inner) * batch.tokens * batch.element, delta_net_work(shape, batch))
    layer //= layout.slices
    chunk = _chunk_tokens(width)
    return layer + (1 if batch.fused else 3) * min(chunk, batch.tokens) * width


def _chunk_tokens(width: int) -> int:
    """Return the number of tokens whose logits are computed at a time, if a token's logits take `width` bytes."""
    return max(CHUNK_BYTES // width // 256, 1) * 256
