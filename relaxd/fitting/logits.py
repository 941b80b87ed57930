"""The output layer: logits exist chunk by chunk, and the first chunks are kept for the backward pass."""

from dataclasses import dataclass

from relaxd.fitting.activations import MicroBatch
from relaxd.models.layouts import Layout
from relaxd.models.shape import ModelShape

CHUNK_BYTES = 1 << 30
"""Bytes of a chunk of logits on a GPU, as in the trainer's services/trainer/learner/logprobs.py."""
KEPT_SHARE = 1 / 24
"""Share of the GPU's memory for kept logits, as there."""


@dataclass(frozen=True)
class LogitBytes:
    """Bytes of the last stage's output on one rank."""

    kept: int
    """Logits that are kept for the backward pass."""
    work: int
    """Chunks that aren't kept, the hidden states before the output layer, and their gradient."""


def logit_bytes(shape: ModelShape, layout: Layout, batch: MicroBatch, gpu_bytes: int) -> LogitBytes:
    """Return the memory of log-probs, if every token of the micro-batch is trained."""
    width = -(-shape.vocabulary // layout.tensor) * batch.logit_bytes
    tokens = batch.tokens // layout.context
    chunk = _chunk_tokens(width)
    kept_chunks = int(gpu_bytes * KEPT_SHARE) // (chunk * width)
    kept = min(tokens, kept_chunks * chunk)
    # torch's operations need three chunks in float32 for one, the fused kernels none.
    copies = 1 if batch.fused else 3
    chunks = copies * min(chunk, tokens) * width if tokens > kept or not batch.fused else 0
    if batch.fused and batch.logit_bytes > batch.element:
        chunks += min(chunk, tokens) * width * batch.element // batch.logit_bytes  # their gradient, rounded
    # Without tensor parallelism: the last residual, the rows that predict a token, their gradient.
    states = (1 + 2 * layout.tensor) * shape.hidden * batch.tokens * batch.element // layout.slices
    return LogitBytes(kept * width, chunks + states)


def forward_work(shape: ModelShape, layout: Layout, batch: MicroBatch) -> int:
    """Return the bytes of a pass without gradients: one layer's tensors, and one chunk of logits."""
    width = -(-shape.vocabulary // layout.tensor) * batch.logit_bytes
    experts = shape.experts
    inner = 3 * shape.ffn if experts is None else experts.per_token * (shape.hidden + 3 * experts.ffn)
    layer = (3 * shape.hidden + inner) * batch.tokens * batch.element // layout.slices
    chunk = _chunk_tokens(width)
    return layer + (1 if batch.fused else 3) * min(chunk, batch.tokens) * width


def _chunk_tokens(width: int) -> int:
    """Return the tokens of a chunk whose logits take `width` bytes each."""
    return max(CHUNK_BYTES // width // 256, 1) * 256
