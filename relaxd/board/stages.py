"""The stages of the dataflow, with the columns that each needs and writes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relaxd.board import schema
from relaxd.config import RunConfig
from relaxd.roles import ROLES

PUBLISH = "publish"
"""Writer of the columns that no stage writes: the coordinator, when it publishes a prompt."""

TRAIN = "train"
"""The last stage; it commits through the step ledger."""


@dataclass(frozen=True)
class Stage:
    """A stage of the dataflow. A group is offered to it once all columns it needs are written."""

    name: str
    needs: tuple[str, ...]
    writes: tuple[str, ...]


STAGES: dict[str, Stage] = {
    name: Stage(name, needs, schema.written_by(name))
    for name, needs in (
        ("rollout", ("prompt_tokens",)),
        ("reward", ("prompt", "text", "finish")),
        ("advantage", ("reward", "lengths")),
        ("reference", ("prompt_tokens", "tokens", "lengths", "loss_mask")),
        (TRAIN, schema.trained_columns()),
    )
}
"""All stages by name. docs/columns.md says what a column holds."""


def stages_for(config: RunConfig) -> tuple[Stage, ...]:
    """Return the stages of a run."""
    stages = dict(STAGES)
    names: tuple[str, ...] = ("rollout", "reward", "advantage", TRAIN)
    if config.has_reference_service:
        reference, train = stages["reference"], stages[TRAIN]
        stages["reference"] = replace(reference, writes=(schema.REF_LOGPROBS,))
        stages[TRAIN] = replace(train, needs=(*train.needs, schema.REF_LOGPROBS))
        names = ("rollout", "reference", "reward", "advantage", TRAIN)
    if config.rollout.return_routed_experts:
        rollout = stages["rollout"]
        stages["rollout"] = replace(rollout, writes=(*rollout.writes, schema.ROUTED_EXPERTS))
    return tuple(stages[name] for name in names)


def roles_for(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the roles that a run needs: those of its stages."""
    stages = {stage.name for stage in stages_for(config)}
    return tuple(role.name for role in ROLES.values() if role.stage in stages)


def producers(stages: Sequence[Stage]) -> dict[str, str]:
    """Map each column to the stage that writes it. Columns not in the result are published with the prompt.

    Raises ValueError when two stages write one column.
    """
    result: dict[str, str] = {}
    for stage in stages:
        for column in stage.writes:
            if column in result:
                raise ValueError(f"stages {result[column]!r} and {stage.name!r} both write column {column!r}")
            result[column] = stage.name
    return result
