"""Parameters of each pipeline stage on one rank."""

from dataclasses import dataclass

from relaxd.fitting.layout import Layout
from relaxd.fitting.shape import ModelShape


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters that a rank holds."""

    dense: int
    """Parameters that all data- and context-parallel ranks of the stage share."""
    experts: int
    """Those of its experts, which fewer ranks share."""

    @property
    def all(self) -> int:
        """All of them."""
        return self.dense + self.experts


def stage_parameters(shape: ModelShape, layout: Layout, stage: int, *, critic: bool = False) -> Parameters:
    """Count the parameters of one rank of a pipeline stage.

    Args:
        shape: the model.
        layout: its division among ranks.
        stage: the stage, from 0.
        critic: whether the model is a critic, which has a value head instead of the output layer.
    """
    tensor, layers = layout.tensor, layout.stage_layers(shape, stage)
    dense, experts = layer_parameters(shape, layout)
    dense, experts = dense * layers, experts * layers
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
    return Parameters(dense, experts)


def layer_parameters(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    """Return a layer's parameters on one rank: those of experts, and the others before them."""
    tensor, hidden, experts = layout.tensor, shape.hidden, shape.experts
    projected = shape.query + 2 * shape.kv
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
    """Return the parameters of the whole model, tied ones once."""
    return stage_parameters(shape, Layout(1), 0).all


def used_parameters(shape: ModelShape) -> int:
    """Return the parameters that compute with a token: without idle experts, and the embedding as output layer only."""
    used = model_parameters(shape) - (0 if shape.tied else shape.vocabulary * shape.hidden)
    if (experts := shape.experts) is not None:
        used -= shape.layers * 3 * shape.hidden * experts.ffn * (experts.count - experts.per_token)
    return used
