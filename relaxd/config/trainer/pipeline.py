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


def chunk_layers(layers: int, stages: int, chosen: Sequence[int] = (), chunks: int = 1) -> list[list[range]]:
    """Return the layers of each stage's chunks.

    A micro-batch goes through the first chunks of all stages, then through their second ones, and so on.

    Args:
        layers: number of the model's layers.
        stages: number of stages.
        chosen: see `stage_layers`; with several chunks none.
        chunks: `trainer.pipeline_chunks`.
    """
    in_order = stage_layers(layers, stages * chunks, chosen)
    return [in_order[stage::stages] for stage in range(stages)]
