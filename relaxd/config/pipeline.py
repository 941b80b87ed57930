"""The division of a model's layers among the stages of a pipeline."""

from collections.abc import Sequence


def stage_layers(layers: int, stages: int, chosen: Sequence[int] = ()) -> list[range]:
    """Return the layers of each stage.

    Args:
        layers: number of the model's layers.
        stages: number of stages.
        chosen: `trainer.pipeline_layers`: the number of each stage's layers, which add up to the model's; none: all
            stages have equally many.
    """
    counts = chosen or [layers // stages] * stages
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
