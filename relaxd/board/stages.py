"""The stages of the dataflow: which columns each needs and which it writes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relaxd.board import schema
from relaxd.config import RunConfig

PUBLISH = "publish"
"""What writes the columns that no stage writes: the coordinator, when it publishes a prompt."""

TRAIN = "train"
"""The last stage: its commit is the step ledger."""


@dataclass(frozen=True)
class Stage:
    """A step of the dataflow. A group is offered to it as soon as every column it needs is there."""

    name: str
    needs: tuple[str, ...]
    writes: tuple[str, ...]


STAGES: dict[str, Stage] = {
    name: Stage(name, needs, schema.written_by(name))
    for name, needs in (
        ("rollout", ("prompt_tokens",)),
        ("reward", ("prompt", "text", "finish")),
        ("advantage", ("reward", "lengths")),
        (TRAIN, schema.trained_columns()),
    )
}
"""Every stage there is. What a column holds is in docs/columns.md."""


def stages_for(config: RunConfig) -> tuple[Stage, ...]:
    """The stages that a run has, from what its algorithm needs and its rollout is asked to keep."""
    stages = dict(STAGES)  # every algorithm so far needs the same four
    if config.rollout.return_routed_experts:
        rollout = stages["rollout"]
        stages["rollout"] = replace(rollout, writes=(*rollout.writes, schema.ROUTED_EXPERTS))
    return tuple(stages[name] for name in ("rollout", "reward", "advantage", TRAIN))


def producers(stages: Sequence[Stage]) -> dict[str, str]:
    """Which stage writes each column of a run; a column that is not in the result is published with the prompt.

    Raises ValueError when two stages write one column.
    """
    result: dict[str, str] = {}
    for stage in stages:
        for column in stage.writes:
            if column in result:
                raise ValueError(f"stages {result[column]!r} and {stage.name!r} both write column {column!r}")
            result[column] = stage.name
    return result
