"""Prediction of a step's seconds and of its bytes between hosts, for ranking layouts. It is an estimate.

Its constants were fitted to ten layouts of a 1.7 B model on H200s (docs/benchmarks.md, "Training on GPUs"); experts'
exchange and offloading several models weren't measured.

To count bytes between hosts (trainer.hosts), ranks are numbered as in Megatron: tensor-parallel ranks fastest, then
context-, data- and pipeline-parallel ranks. Each host has consecutive ranks. Sums and gathers count as rings,
all-to-all as messages between every two ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relaxd.models.flops import PEAK_FLOPS, state_flops
from relaxd.models.layouts import Layout, stage_parameters, used_parameters
from relaxd.models.shape import ModelShape
from relaxd.tools.fitting.trainer_memory import Bytes

EFFICIENCY = 0.52
"""Share of an H200's peak FLOPs per second that a single rank reaches in training passes."""
TOWER_EFFICIENCY = 0.125
"""Share of an H200's peak FLOPs per second that a media tower reaches on single images of 1,024 tokens. Measured: 0.105
to 0.155."""
EXTRA_WORK = {"none": 1.0, "selective": 1.06, "full": 4 / 3}
"""Factor by which recomputation multiplies the FLOPs of a training pass, by trainer.recompute."""
TENSOR_BYTES_PER_SECOND = 2.2e11
"""Speed of tensor-parallel collectives within a layer, over NVLink, in bytes per second."""
EXCHANGE_BYTES_PER_SECOND = 1.0e11
"""Speed of all-to-all exchanges, including the copies before and after them, in bytes per second."""
GRADIENT_BYTES_PER_SECOND = 3.0e11
"""Speed at which ranks sum gradients and gather updated weights, in bytes per second."""
OPTIMIZER_BYTES_PER_SECOND = 1.4e12
"""Speed at which an optimizer update reads and writes GPU memory, in bytes per second."""
UPDATE_BYTES = 30
"""Bytes of GPU memory that an optimizer update reads and writes per parameter."""
OFFLOAD_SECONDS = 0.7e-9
"""Seconds per parameter that an optimizer update in host memory takes all ranks of a host together."""
SCHEDULE = 20
"""Maximum micro-batches of a pipeline schedule, divided by the number of stages minus 1; equals
services/trainer/batch/step_plan.py."""
FULLNESS = 0.9
"""Average share of a micro-batch's token budget that its sequences fill."""


@dataclass(frozen=True)
class StepWork:
    """The trainer's work in a step: tokens, passes and updates."""

    tokens: float
    """Number of tokens in all rows of the step."""
    attended: float
    """Number of (token, attended token) pairs that attention computes in the step."""
    micro_batch_tokens: int
    updates: int = 1
    """Number of optimizer updates in the step."""
    passes: float = 1.0
    """Number of training passes over the step's tokens; a forward pass alone counts as a third."""
    mini_batches: int = 1
    """Number of mini-batches of the step, each of which has a separate pipeline schedule."""
    tower_flops: float = 0.0
    """FLOPs of the media towers in the whole step, all passes together."""


@dataclass(frozen=True)
class Seconds:
    """Predicted seconds of the trainer's part of a step, by purpose."""

    compute: float
    bubble: float
    """Seconds in which ranks are idle while the pipeline fills and drains, or wait for its slowest stage."""
    communication: float
    update: float
    towers: float
    """Seconds of the media towers' passes, for which all later pipeline stages wait."""

    @property
    def total(self) -> float:
        """Predicted seconds of the trainer's part of a step: the sum over all purposes."""
        return self.compute + self.bubble + self.communication + self.update + self.towers


def predict(shape: ModelShape, layout: Layout, work: StepWork, element: int = 2) -> Seconds:
    """Predict the trainer's seconds for a step whose groups are all ready.

    FLOPs per token: 6 per used parameter; 12 x heads x head size per attention layer and attended token; and those of
    gated delta nets' states, whose lower speed as plain torch operations isn't modelled. Each rank that shares a
    micro-batch runs the towers on all of its media.
    """
    ranks, stages = layout.ranks, layout.pipeline
    extra = 1 + (EXTRA_WORK[layout.recompute] - 1) * layout.recomputed_layers(shape) / layout.stage_layers(shape)
    of_output = 6.0 * shape.vocabulary * shape.hidden * work.tokens
    attention = 12.0 * shape.attention_layers * shape.query * work.attended + state_flops(shape) * work.tokens
    of_layers = (6.0 * used_parameters(shape) * work.tokens - of_output + attention) * extra
    of_rank = PEAK_FLOPS["H200"] * (1 if element == 2 else 0.1)
    speed = of_rank * EFFICIENCY * ranks
    compute = (of_layers + of_output) / speed
    # All wait for the slowest stage. The last one has the output layer besides its layers.
    shares = [layout.stage_layers(shape, stage) / shape.layers for stage in range(stages)]
    slowest = max(max(shares) * of_layers, shares[-1] * of_layers + of_output) * stages / speed
    per_update = micro_batches(layout, work)
    schedule = max(1.0, min(per_update, float(SCHEDULE * (stages - 1))))
    bubble = slowest * (1 + (stages - 1) / layout.pipeline_chunks / schedule) - compute
    return Seconds(
        compute * work.passes,
        bubble * work.passes,
        _communication(shape, layout, work.tokens, element) * work.passes,
        _update(shape, layout, element, per_update) * work.updates,
        work.tower_flops / (of_rank * TOWER_EFFICIENCY * layout.data),
    )


def micro_batches(layout: Layout, work: StepWork) -> float:
    """Return the average number of micro-batches that a data-parallel rank processes per optimizer update."""
    return work.tokens / work.mini_batches / (FULLNESS * work.micro_batch_tokens) / layout.data


def _communication(shape: ModelShape, layout: Layout, tokens: float, element: int) -> float:
    """Return the seconds that a training pass over the step spends sending: a rank's bytes, divided by the links'
    speed."""
    layers = layout.stage_layers(shape)
    here = tokens * element / layout.data  # bytes of one channel of the rows of one replica
    seconds = 0.0
    if layout.tensor > 1:  # four gathers or reductions forward, six backward
        bytes_ = 10 * layers * shape.hidden * here / layout.context * (layout.tensor - 1) / layout.tensor
        seconds += bytes_ / TENSOR_BYTES_PER_SECOND
    if layout.context > 1:  # queries, keys, values and outputs, forward and backward
        division = layout.division(shape)
        width = 4 * (shape.query + shape.kv * division.copies * division.gathering) / layout.slices
        seconds += layers * width * here * (layout.context - 1) / layout.context / EXCHANGE_BYTES_PER_SECOND
    if shape.experts is not None and layout.expert > 1:  # to the experts and back, forward and backward
        width = 4 * shape.experts.per_token * shape.hidden / layout.slices
        seconds += layers * width * here * (layout.expert - 1) / layout.expert / EXCHANGE_BYTES_PER_SECOND
    if layout.pipeline > 1:  # hidden states to the next stage, their gradients back, for each chunk
        seconds += 2 * layout.pipeline_chunks * shape.hidden * here / layout.slices / TENSOR_BYTES_PER_SECOND
    return seconds


def _update(shape: ModelShape, layout: Layout, element: int, micro_batches: float) -> float:
    """Return the seconds of an optimizer update, including the sum of gradients over ranks.

    Sharded gradients are summed once per micro-batch, others once per update.
    """
    own = stage_parameters(shape, layout, 0)
    sharing, expert_sharing = layout.data * layout.context, layout.expert_data
    sharded = own.dense / sharing + own.experts / expert_sharing
    moved = own.dense * (1 - 1 / sharing) + own.experts * (1 - 1 / expert_sharing)
    sums = max(1.0, micro_batches) if layout.shard_gradients else 1
    seconds = moved * (4 * sums + element) / GRADIENT_BYTES_PER_SECOND
    if layout.offload:
        return seconds + sharded * layout.ranks * OFFLOAD_SECONDS
    return seconds + sharded * UPDATE_BYTES / OPTIMIZER_BYTES_PER_SECOND


GRADIENT_BYTES = 4
"""Bytes per element of gradients, which are float32."""


def crossing_bytes(shape: ModelShape, layout: Layout, work: StepWork, hosts: int, element: int) -> Bytes:
    """Return the bytes that a host sends to other hosts per step, by kind of data; of each kind the maximum over hosts.

    `element` is the bytes per element of weights and activations. Returns {} if there is only one host.
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
    """Return all process groups of a kind, as lists of ranks. Kinds: "data and context", "context", "expert" and
    "expert data"."""
    stage = layout.ranks // layout.pipeline
    # By kind: distance between neighbouring ranks of a group, and number of ranks in a group.
    apart, size = {
        "data and context": (layout.tensor, layout.context * layout.data),
        "context": (layout.tensor, layout.context),
        "expert": (layout.expert_tensor, layout.expert),
        "expert data": (layout.expert_tensor * layout.expert, layout.expert_data),
    }[kind]
    firsts = [first for first in range(layout.ranks) if (first % stage) // apart % size == 0]
    return [[first + apart * number for number in range(size)] for first in firsts]


def _in_rings(rings: Iterable[Sequence[int]], each: int) -> float:
    """Return the data that a host's ranks send to other hosts in ring collectives, in units of a ring's buffer.

    `each` is the number of ranks per host. The result is the maximum over hosts.
    """
    return _largest_sum(
        (rank // each, (len(ring) - 1) / len(ring))
        for ring in rings
        for rank, following in zip(ring, [*ring[1:], ring[0]], strict=True)
        if rank // each != following // each
    )


def _all_to_all(rank_groups: Iterable[Sequence[int]], each: int) -> float:
    """Return the data that a host's ranks send to other hosts in an all-to-all exchange, in units of a rank's rows.

    `each` is the number of ranks per host. The result is the maximum over hosts.
    """
    return _largest_sum(
        (rank // each, sum(other // each != rank // each for other in group) / len(group))
        for group in rank_groups
        for rank in group
    )


def _between_stages(layout: Layout, each: int) -> float:
    """Return the data that a host's ranks send to pipeline stages on other hosts, in units of a rank's rows.

    Counts rows forward and their gradients backward. `each` is the number of ranks per host. The result is the maximum
    over hosts.
    """
    stage = layout.ranks // layout.pipeline
    pairs = ((rank, (rank + stage) % layout.ranks) for rank in range(layout.ranks))
    # Rows go from the last stage back to the first one, except after the last chunk.
    return _largest_sum(
        (host, layout.pipeline_chunks - (rank >= layout.ranks - stage))
        for rank, following in pairs
        if rank // each != following // each
        for host in (rank // each, following // each)  # rows forward, their gradients backward
    )


def _largest_sum(sent: Iterable[tuple[int, float]]) -> float:
    """Return the largest total amount that a host sends; `sent` has (host, amount) pairs."""
    sums: dict[int, float] = {}
    for host, amount in sent:
        sums[host] = sums.get(host, 0.0) + amount
    return max(sums.values(), default=0.0)
