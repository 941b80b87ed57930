"""Layouts: divide a model among pipeline stages, tensor- and context-parallel ranks, and list the divisions that a
model and a run allow.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from math import gcd
from typing import Literal

from relaxd.config import ReplicaSizes, TrainerConfig
from relaxd.models.shape import ModelShape


def stage_layers(layers: int, stages: int, chosen: Sequence[int] = ()) -> list[range]:
    """Return the layers of each pipeline stage.

    Args:
        layers: number of the model's layers.
        stages: number of stages.
        chosen: `trainer.pipeline_layers`: the number of each stage's layers, which add up to the model's; empty:
            divided evenly.
    """
    counts = chosen or [layers // stages] * stages
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def chunk_layers(layers: int, stages: int, chosen: Sequence[int] = (), chunks: int = 1) -> list[list[range]]:
    """Return the layers of each pipeline stage, by chunk.

    A micro-batch goes through the first chunks of all stages, then through their second ones, and so on.

    Args:
        layers: number of the model's layers.
        stages: number of stages.
        chosen: see `stage_layers`; empty with several chunks.
        chunks: `trainer.pipeline_chunks`.
    """
    in_order = stage_layers(layers, stages * chunks, chosen)
    return [in_order[stage::stages] for stage in range(stages)]


@dataclass(frozen=True)
class ContextDivision:
    """Division of the attention of one tensor-parallel rank's heads among context-parallel ranks."""

    exchanging: int
    """Number of ranks in a set of exchanging ranks. They exchange tokens for heads: each rank attends with some of the
    heads over all tokens of the set."""
    gathering: int
    """Number of sets of exchanging ranks. Each set attends from its own tokens, and gathers the keys and values of
    all sets."""
    copies: int
    """Number of exchanging ranks that have the same key-value head."""


def context_division(ranks: int, heads: int, kv_heads: int) -> ContextDivision:
    """Divide attention so that the sets of ranks that exchange tokens for heads are as large as possible.

    Each rank then has either whole key-value heads, or an equal part of one key-value head's query heads.

    Args:
        ranks: context-parallel ranks.
        heads: query heads of a tensor-parallel rank.
        kv_heads: key-value heads of a tensor-parallel rank, which divide `heads`.
    """
    exchanging = max(
        size
        for size in range(1, ranks + 1)
        if ranks % size == 0 and (kv_heads % size == 0 or (size % kv_heads == 0 and heads % size == 0))
    )
    return ContextDivision(exchanging, ranks // exchanging, max(exchanging // kv_heads, 1))


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Layout:
    """Division of a model among ranks: the parallel sizes, and settings that save memory."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    _: KW_ONLY
    recompute: Recompute = "none"
    recompute_layers: int = 0
    """Number of layers in each pipeline stage whose activations are recomputed; 0: all layers."""
    offload: bool = False
    """True if the optimizer's state is in the host's memory."""
    pipeline_layers: tuple[int, ...] = ()
    """Number of layers of each pipeline stage; empty: the layers are divided evenly."""
    pipeline_chunks: int = 1
    """Number of chunks into which each pipeline stage's layers are divided."""
    activations_on_host: int = 0
    """Host memory in which each rank may keep activations, in bytes."""
    shard_gradients: bool = False
    """True if each rank keeps only a shard of the gradients."""
    overlap_grad_reduce: bool = False
    """True if gradients are reduced among ranks during the backward pass, not after it."""

    @classmethod
    def of_trainer(cls, config: TrainerConfig) -> "Layout":
        """Create the layout that the trainer's settings give."""
        return cls(
            config.ranks,
            config.tensor_parallel,
            config.pipeline_parallel,
            config.context_parallel,
            config.expert_parallel,
            recompute=config.recompute,
            recompute_layers=config.recompute_layers,
            offload=config.optimizer.cpu_offload,
            pipeline_layers=config.pipeline_layers,
            pipeline_chunks=config.pipeline_chunks,
            activations_on_host=config.activation_offload_bytes,
            shard_gradients=config.shard_gradients,
            overlap_grad_reduce=config.overlap_grad_reduce,
        )

    @classmethod
    def of_replica(cls, config: ReplicaSizes) -> "Layout":
        """Create the layout of a replica that holds a frozen model or the critic."""
        sizes = config.tensor_parallel, config.pipeline_parallel, config.context_parallel, config.expert_parallel
        return cls(config.ranks, *sizes)

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, which work on different groups."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def expert_tensor(self) -> int:
        """Number of ranks that share each expert's matrices; 1 under expert parallelism, where ranks hold whole
        experts.

        Without expert parallelism, Megatron treats experts as ordinary parameters and wouldn't sum the gradients of
        experts that tensor-parallel ranks hold whole.
        """
        return self.tensor if self.expert == 1 else 1

    @property
    def expert_data(self) -> int:
        """Number of ranks that hold a copy of the same experts."""
        return self.ranks // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def slices(self) -> int:
        """Number of ranks among which a micro-batch's tokens are divided: tensor-parallel (by sequence parallelism) and
        context-parallel ones."""
        return self.tensor * self.context

    @property
    def name(self) -> str:
        """Short description of the layout, such as "TP2 PP2 DP2, selective"."""
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "EP": self.expert, "DP": self.data}
        words = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 rank"
        words += " (" + "+".join(map(str, self.pipeline_layers)) + " layers)" if self.pipeline_layers else ""
        words += f" ({self.pipeline_chunks} chunks)" if self.pipeline_chunks > 1 else ""
        if self.recompute != "none":
            words += f", {self.recompute} recompute" + (f" of {self.recompute_layers}" if self.recompute_layers else "")
        words += ", sharded gradients" if self.shard_gradients else ""
        return words + (", offload" if self.offload else "")

    @property
    def settings(self) -> dict[str, int | str | bool | tuple[int, ...]]:
        """Values of the [trainer] settings that give this layout."""
        return {
            "trainer.ranks": self.ranks,
            "trainer.tensor_parallel": self.tensor,
            "trainer.pipeline_parallel": self.pipeline,
            "trainer.pipeline_layers": self.pipeline_layers,
            "trainer.pipeline_chunks": self.pipeline_chunks,
            "trainer.context_parallel": self.context,
            "trainer.expert_parallel": self.expert,
            "trainer.recompute": self.recompute,
            "trainer.recompute_layers": self.recompute_layers,
            "trainer.optimizer.cpu_offload": self.offload,
            "trainer.shard_gradients": self.shard_gradients,
        }

    def division(self, shape: ModelShape) -> ContextDivision:
        """Return the division of attention among context-parallel ranks. The model's heads must be divisible by
        tensor_parallel."""
        return context_division(self.context, shape.heads // self.tensor, shape.kv_heads // self.tensor)

    def stage_layers(self, shape: ModelShape, stage: int = 0) -> int:
        """Return the number of layers of a pipeline stage."""
        return len(self.layers_of_stage(shape, stage))

    def layers_of_stage(self, shape: ModelShape, stage: int) -> list[int]:
        """List the layers of a pipeline stage, numbered over the whole model from 0."""
        chunks = chunk_layers(shape.layers, self.pipeline, self.pipeline_layers, self.pipeline_chunks)[stage]
        return [layer for chunk in chunks for layer in chunk]

    def recomputed_layers(self, shape: ModelShape, stage: int = 0) -> int:
        """Return the number of layers in a pipeline stage whose activations are recomputed."""
        if self.recompute == "none":
            return 0
        return min(self.recompute_layers or shape.layers, self.stage_layers(shape, stage))


def problem(layout: Layout, shape: ModelShape, section: str = "trainer") -> str:
    """Return a message about the first parallel setting that doesn't divide the model, with valid values; "" if every
    setting divides it."""
    return next((f"{section}.{field} {wrong}" for field, wrong in problems(layout, shape)), "")


def problems(layout: Layout, shape: ModelShape) -> list[tuple[str, str]]:
    """Return each parallel setting that doesn't divide the model, with a message that names valid values.

    Context parallelism needs no division: where heads don't divide, ranks attend from slices of the tokens.
    """
    experts = shape.experts
    divided = [
        ("tensor_parallel", layout.tensor, "query heads", shape.heads),
        ("tensor_parallel", layout.tensor, "key-value heads", shape.kv_heads),
    ]
    found = []
    if (delta_net := shape.delta_net) is not None:
        divided.append(("tensor_parallel", layout.tensor, "key heads of gated delta nets", delta_net.key_heads))
        if layout.context > 1:
            wrong = f"is {layout.context}: it must be 1, because gated delta nets ({shape.model_type}) carry a state"
            found.append(("context_parallel", f"{wrong} from token to token, which context-parallel ranks can't share"))
    if not layout.pipeline_layers:
        divided.append(("pipeline_parallel", layout.pipeline, "layers", shape.layers))
    elif sum(layout.pipeline_layers) != shape.layers:
        wrong = f"is {list(layout.pipeline_layers)}: it must add up to the model's {shape.layers} layers"
        found.append(("pipeline_layers", wrong))
    if experts is None:
        divided.append(("tensor_parallel", layout.tensor, "MLP columns", shape.ffn))
        divided.append(("expert_parallel", layout.expert, "expert (it is a dense model)", 1))
    else:
        divided.append(("expert_parallel", layout.expert, "experts", experts.count))
        divided.append(("tensor_parallel", layout.expert_tensor, "expert columns", experts.ffn))
        divided.append(("tensor_parallel", layout.tensor, "columns of the shared expert", experts.shared_ffn))
        holding = layout.ranks // layout.pipeline
        if holding % layout.expert:
            wrong = f"is {layout.expert}: it must divide the {holding} ranks of a pipeline stage"
            found.append(("expert_parallel", wrong))
    for field, size, what, count in divided:
        if count % size and field not in dict(found):
            divisible = gcd(*(other for name, _, _, other in divided if name == field))
            fitting = _divisors(divisible, layout.ranks)
            wrong = f"is {size}: it must divide the model's {count} {what}; sizes that do: {fitting}"
            found.append((field, wrong))
    chunk = len(chunk_layers(shape.layers, layout.pipeline, layout.pipeline_layers, layout.pipeline_chunks)[0][0])
    if shape.vision is not None and chunk < shape.vision.deepstack and not found:
        field = "pipeline_chunks" if layout.pipeline_chunks > 1 else "pipeline_parallel"
        wrong = (
            f"is {getattr(layout, field.removesuffix('_parallel'))}: the first {chunk} layers are together, but images "
            f"(DeepStack) need the first {shape.vision.deepstack} to be"
        )
        found.append((field, wrong))
    of_stage = shape.layers // layout.pipeline
    if "pipeline_parallel" not in dict(found) and of_stage % layout.pipeline_chunks:
        wrong = (
            f"is {layout.pipeline_chunks}: it must divide the {of_stage} layers of a pipeline stage; numbers that do: "
        )
        found.append(("pipeline_chunks", wrong + _divisors(of_stage, of_stage)))
    return found


def _divisors(number: int, most: int) -> str:
    """Return the divisors of a number up to `most` as a text for messages."""
    return ", ".join(str(other) for other in range(1, most + 1) if number % other == 0)


def possible_layouts(shape: ModelShape, ranks: int, groups: int, *, offload: bool) -> list[Layout]:
    """Return every layout of `ranks` ranks that divides the model and a step's groups.

    Args:
        shape: the model.
        ranks: number of ranks.
        groups: groups of a step.
        offload: True if the optimizer's state may be in the host's memory.
    """
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    found = []
    for tensor in sizes:
        for pipeline in sizes:
            for context in sizes:
                if ranks % (tensor * pipeline * context):
                    continue
                for expert in sizes if shape.experts is not None else [1]:
                    bare = Layout(ranks, tensor, pipeline, context, expert)
                    if problem(bare, shape) or groups % bare.data:
                        continue
                    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
                    found += [
                        replace(bare, recompute=recompute, offload=offloaded)
                        for recompute in kinds
                        for offloaded in ((False, True) if offload else (False,))
                    ]
    return found


@dataclass(frozen=True)
class Parameters:
    """Number of parameters that a rank holds, by kind."""

    dense: int
    """Number of parameters outside experts and towers. All data- and context-parallel ranks of a stage have copies."""
    experts: int
    """Number of experts' parameters, of which fewer ranks have copies."""
    vision: int = 0
    """Number of towers' parameters, all of which each rank of the first stage holds. By default they aren't trained."""

    @property
    def all(self) -> int:
        """Number of all parameters that the rank holds."""
        return self.dense + self.experts + self.vision

    def trained(self, *, vision: bool) -> "Parameters":
        """Return the numbers of trained parameters; `vision`: True if towers are trained."""
        return Parameters(self.dense + (self.vision if vision else 0), self.experts)


def stage_parameters(shape: ModelShape, layout: Layout, stage: int, *, critic: bool = False) -> Parameters:
    """Return the number of parameters that one rank of a pipeline stage holds.

    Args:
        shape: the model.
        layout: its division among ranks.
        stage: the stage, from 0.
        critic: whether the model is a critic, which has a value head instead of the output layer.
    """
    tensor = layout.tensor
    of_layers = [layer_parameters(shape, layout, layer) for layer in layout.layers_of_stage(shape, stage)]
    dense, experts = (sum(counts) for counts in zip(*of_layers, strict=True))
    vocabulary = -(-shape.vocabulary // tensor) * shape.hidden
    first, last = stage == 0, stage == layout.pipeline - 1
    if first:
        dense += vocabulary
    if last:
        dense += shape.hidden
        if critic:
            dense += shape.hidden
        elif not shape.tied or not first:  # the last stage has a copy of a tied embedding
            dense += vocabulary
    return Parameters(dense, experts, shape.tower_parameters if first else 0)


def layer_parameters(shape: ModelShape, layout: Layout, layer: int) -> tuple[int, int]:
    """Return the numbers of parameters, outside experts and of experts, that a rank holds of one layer. Layers are
    numbered from 0."""
    tensor, hidden, experts = layout.tensor, shape.hidden, shape.experts
    if shape.delta_net is not None and shape.has_delta_net(layer):
        dense = 2 * hidden + shape.delta_net.parameters(hidden, tensor)
    else:
        projected = (2 if shape.output_gate else 1) * shape.query + 2 * shape.kv
        dense = 2 * hidden + projected * hidden // tensor + shape.query * hidden // tensor
        dense += 2 * shape.head_size if shape.qk_norm else 0
        dense += projected // tensor if shape.qkv_bias else 0
        dense += hidden if shape.output_bias else 0
    if experts is None:
        return dense + 3 * hidden * shape.ffn // tensor, 0
    dense += experts.count * hidden
    if experts.shared_ffn:
        dense += 3 * hidden * experts.shared_ffn // tensor + hidden
    return dense, 3 * hidden * experts.ffn * experts.count // (layout.expert * layout.expert_tensor)


def model_parameters(shape: ModelShape) -> int:
    """Return the number of the whole model's parameters. Tied parameters count once."""
    return stage_parameters(shape, Layout(1), 0).all


def used_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that are used to compute a token of text.

    Excludes idle experts, towers, and an embedding that isn't also the output layer.
    """
    used = stage_parameters(shape, Layout(1), 0).trained(vision=False).all - (
        0 if shape.tied else shape.vocabulary * shape.hidden
    )
    if (experts := shape.experts) is not None:
        used -= shape.layers * 3 * shape.hidden * experts.ffn * (experts.count - experts.per_token)
    return used
