"""Memory of sharded gradients during a backward pass: of the buckets that wait for their last gradients.

The buckets are Megatron's, which fills one after the other, from the last parameter to the first, until it has
`least_parameters` or more.
"""

from collections.abc import Sequence

from relaxd.models.layouts import Layout, layer_parameters, stage_parameters
from relaxd.models.shape import ModelShape

LEAST_PARAMETERS = 40_000_000
"""Minimum parameters of a bucket except the last; a million per data-parallel rank, if that is more."""


def buckets_in_memory(
    shape: ModelShape, layout: Layout, stage: int, *, critic: bool = False, least: int | None = None
) -> int:
    """Return the bytes that the buckets of a rank have at once, at most.

    These are two neighbours, because a layer may be in both, and with overlapped reduction one more, which is being
    reduced; of the dense parameters and of the experts. A tied embedding gets its first gradient at the beginning of a
    pass and its last one at the end, so that its bucket is there all the time.

    Args:
        shape: the model.
        layout: its division among ranks.
        stage: the pipeline stage.
        critic: whether the model is a critic.
        least: parameters of a bucket at least; None: what Megatron chooses.
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
    """Return the sizes of a stage's parameters: those that all ranks of the stage share, and those of experts.

    Small ones of a layer count as one.
    """
    tensor, hidden, experts = layout.tensor, shape.hidden, shape.experts
    ffn = shape.ffn if experts is None else experts.shared_ffn
    matrices = [
        shape.query * hidden // tensor,
        (shape.query + 2 * shape.kv) * hidden // tensor,
        2 * hidden * ffn // tensor,
        hidden * ffn // tensor,
    ]
    of_layer, of_experts = layer_parameters(shape, layout)
    layers = layout.stage_layers(shape, stage)
    dense = [of_layer - sum(matrices), *matrices] * layers
    vocabulary = -(-shape.vocabulary // tensor) * hidden
    first = [vocabulary] if stage == 0 else []
    rest = stage_parameters(shape, layout, stage, critic=critic).dense - sum(dense) - sum(first)
    return [*first, *dense, rest], [of_experts * 2 // 3, of_experts // 3] * layers


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
