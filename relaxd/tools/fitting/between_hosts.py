"""Bytes that a trainer's ranks send from host to host in a step (trainer.hosts).

Ranks are numbered as Megatron does, tensor-parallel ones fastest, then context-, data- and pipeline-parallel ones. Each
host has consecutive numbers. Sums and gathers are counted as rings, exchanges as messages from each rank to each other.
"""

from collections.abc import Iterable, Sequence

from relaxd.models.layouts import Layout, stage_parameters
from relaxd.models.shape import ModelShape
from relaxd.tools.fitting.speed import StepWork, micro_batches
from relaxd.tools.fitting.trainer_memory import Bytes

GRADIENT_BYTES = 4
"""Bytes of an element of a gradient, which is float32."""


def crossing_bytes(shape: ModelShape, layout: Layout, work: StepWork, hosts: int, element: int) -> Bytes:
    """Return the bytes that the host that sends the most of a kind sends to others in a step, by kind.

    `element` are the bytes of a weight, and of an activation. On one host it is nothing.
    """
    if hosts == 1:
        return {}
    each = layout.ranks // hosts
    own = stage_parameters(shape, layout, 0)
    sums = max(1.0, micro_batches(layout, work)) if layout.shard_gradients else 1.0
    parameters = 0.0  # of which each rank sends its part to the next in a ring
    sharing, expert_sharing = groups(layout, "data and context"), groups(layout, "expert data")
    for ranks, size in ((sharing, own.dense), (expert_sharing, own.experts)):
        parameters += _in_rings(ranks, each) * size
    # Rows of one channel, in bytes, that a rank works on in a step.
    rows = work.tokens * element / layout.data / layout.slices * work.passes
    layers = layout.stage_layers(shape)
    division = layout.division(shape)
    attention = 4 * (shape.query + shape.kv * division.copies * division.gathering)
    chosen = shape.experts.per_token if shape.experts is not None else 0
    found = {
        "gradients": parameters * GRADIENT_BYTES * sums * work.updates,
        "updated weights": parameters * element * work.updates,
        "rows between pipeline stages": _between_stages(layout, each) * shape.hidden * rows,
        "queries, keys and values": _all_to_all(groups(layout, "context"), each) * layers * attention * rows,
        "rows to experts and back": _all_to_all(groups(layout, "expert"), each)
        * (layers * 4 * chosen * shape.hidden * rows),
    }
    return {name: int(size) for name, size in found.items() if size}


def groups(layout: Layout, kind: str) -> list[list[int]]:
    """Return the ranks of each group of a kind: "data and context", "context", "expert" or "expert data"."""
    stage = layout.ranks // layout.pipeline
    # Of each kind: how far its neighbours are from each other, and how many there are.
    apart, size = {
        "data and context": (layout.tensor, layout.context * layout.data),
        "context": (layout.tensor, layout.context),
        "expert": (layout.expert_tensor, layout.expert),
        "expert data": (layout.expert_tensor * layout.expert, layout.expert_data),
    }[kind]
    firsts = [first for first in range(layout.ranks) if (first % stage) // apart % size == 0]
    return [[first + apart * number for number in range(size)] for first in firsts]


def _in_rings(rings: Iterable[Sequence[int]], each: int) -> float:
    """Return the parts of a buffer that the ranks of one host send to others in a ring, in buffers; the maximum over
    hosts."""
    sent: dict[int, float] = {}
    for ring in rings:
        for rank, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            if rank // each != following // each:
                sent[rank // each] = sent.get(rank // each, 0.0) + (len(ring) - 1) / len(ring)
    return max(sent.values(), default=0.0)


def _all_to_all(rank_groups: Iterable[Sequence[int]], each: int) -> float:
    """Return the rows that the ranks of one host send to other hosts, in multiples of a rank's rows; the maximum over
    hosts."""
    sent: dict[int, float] = {}
    for group in rank_groups:
        for rank in group:
            far = sum(other // each != rank // each for other in group)
            sent[rank // each] = sent.get(rank // each, 0.0) + far / len(group)
    return max(sent.values(), default=0.0)


def _between_stages(layout: Layout, each: int) -> float:
    """Return the number of times that a rank's rows leave a host for a stage elsewhere, both ways: the maximum."""
    stage, sent = layout.ranks // layout.pipeline, dict[int, float]()
    # From the last stage rows go back to the first one, but after the last chunk.
    for rank in range(layout.ranks):
        last = rank >= layout.ranks - stage
        times = layout.pipeline_chunks - last
        following = (rank + stage) % layout.ranks
        if times and rank // each != following // each:
            for host in (rank // each, following // each):  # rows forward, their gradients backward
                sent[host] = sent.get(host, 0.0) + times
    return max(sent.values(), default=0.0)
