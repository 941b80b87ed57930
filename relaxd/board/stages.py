"""The stages of the dataflow, with the columns that each needs and writes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relaxd.config import RunConfig

PUBLISH = "publish"
"""Writer of the columns that no stage writes: the coordinator, when it publishes a prompt."""

TRAIN = "train"
"""The last stage; it commits through the step ledger."""

VERSIONS = "versions"
"""The column with the weight version of every token."""


@dataclass(frozen=True)
class Stage:
    """A stage of the dataflow. A group is offered to it once all columns it needs are written."""

    name: str
    needs: tuple[str, ...]
    writes: tuple[str, ...]


ROUTED_EXPERTS = "routed_experts"
"""The column with each token's experts, written if rollout.return_routed_experts is set."""

GENERATED = ("tokens", "lengths", "loss_mask", "rollout_logprobs", VERSIONS, "finish", "text", "spans_weight_update")
"""Columns of the rollout stage; the trainer needs all of them."""

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="rollout",
            needs=("prompt_tokens",),
            writes=GENERATED,
        ),
        Stage(name="reward", needs=("prompt", "text", "finish"), writes=("reward", "reward_parts")),
        Stage(name="advantage", needs=("reward", "lengths"), writes=("advantages",)),
        Stage(
            name=TRAIN,
            needs=(
                "prompt_tokens",
                "prompt",
                *GENERATED,
                "reward",
                "reward_parts",
                "advantages",
            ),
            writes=(),
        ),
    )
}
"""All stages by name."""


def stages_for(config: RunConfig) -> tuple[Stage, ...]:
    """Return the stages of a run."""
    stages = dict(STAGES)  # every algorithm so far needs the same four
    if config.rollout.return_routed_experts:
        rollout = stages["rollout"]
        stages["rollout"] = replace(rollout, writes=(*rollout.writes, ROUTED_EXPERTS))
    return tuple(stages[name] for name in ("rollout", "reward", "advantage", TRAIN))


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
