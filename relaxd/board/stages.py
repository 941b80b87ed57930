"""The stages of the dataflow: which columns each needs and which it writes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relaxd.config import RunConfig

PUBLISH = "publish"
"""What writes the columns that no stage writes: the coordinator, when it publishes a prompt."""

TRAIN = "train"
"""The last stage: its commit is the step ledger."""

VERSIONS = "versions"
"""The column with the weight version of every token."""


@dataclass(frozen=True)
class Stage:
    """A step of the dataflow. A group is offered to it as soon as every column it needs is there."""

    name: str
    needs: tuple[str, ...]
    writes: tuple[str, ...]


ROUTED_EXPERTS = "routed_experts"
"""The column with the experts that each token was sent to, where rollout.return_routed_experts asks for it."""

GENERATED = ("tokens", "lengths", "loss_mask", "rollout_logprobs", VERSIONS, "finish", "text", "spans_weight_update")
"""What the rollout stage writes, and the trainer needs all of."""

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
"""Every stage there is. What a column holds is in docs/architecture.md."""


def stages_for(config: RunConfig) -> tuple[Stage, ...]:
    """The stages that a run has, from what its algorithm needs and its rollout is asked to keep."""
    stages = dict(STAGES)  # every algorithm so far needs the same four
    if config.rollout.return_routed_experts:
        rollout = stages["rollout"]
        stages["rollout"] = replace(rollout, writes=(*rollout.writes, ROUTED_EXPERTS))
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
