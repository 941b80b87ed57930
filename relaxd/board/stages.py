"""The stages of the dataflow, with the columns that each needs and writes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from relaxd.algorithms import create
from relaxd.board import schema
from relaxd.config import RunConfig
from relaxd.data.curriculum.group_filter import COLUMNS as FILTER_COLUMNS
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


_NEEDS: dict[str, tuple[str, ...]] = {
    "rollout": ("prompt_tokens",),
    "reward": ("prompt", "sample_of_sequence", "lengths", "loss_mask", "text", "finish"),
    "reference": ("prompt_tokens", "tokens", "lengths", "loss_mask", "shares_prompt"),
    "teacher": ("prompt_tokens", "tokens", "lengths", "loss_mask", "shares_prompt"),
    "advantage": ("reward", "sample_of_sequence", "lengths"),
}
"""Columns that the stages before the trainer need in every run."""


def _stage(name: str, optional: Collection[str], needs: Sequence[str] = ()) -> Stage:
    """Return a stage of a run with these optional columns; `needs` are columns that only this run's stage needs."""
    common = schema.trained_columns(optional) if name == TRAIN else _NEEDS[name]
    return Stage(name, tuple(dict.fromkeys((*common, *needs))), schema.written_by(name, optional))


STAGES: dict[str, Stage] = {name: _stage(name, ()) for name in (*_NEEDS, TRAIN)}
"""All stages by name, without optional columns. docs/columns.md says what a column holds."""


def stages_for(config: RunConfig) -> tuple[Stage, ...]:
    """Return the stages of a run, which follow from what its algorithm needs.

    Raises ValueError when the algorithm needs a column that isn't written by then, or its loss one without tokens.
    """
    absent = {
        *(() if config.has_reference_service else ("reference",)),
        *(() if config.has_teacher else ("teacher",)),
    }
    names = [name for name in (*_NEEDS, TRAIN) if name not in absent]
    needs = create(config.algorithm).needs
    written = {c.name for c in schema.COLUMNS.values() if c.writer in (PUBLISH, *names) and c.writer != TRAIN}
    who = f"algorithm.name = {config.algorithm.name!r}"
    for name in needs.loss:
        if name not in {*written, schema.REF_LOGPROBS} or schema.COLUMNS[name].shape != "T":
            raise ValueError(f"{who}: its loss needs {name!r}, which isn't a column of tokens that the run has")
    for name in needs.advantages:
        if name not in written or schema.COLUMNS[name].writer == "advantage":
            raise ValueError(f"{who}: its advantages need {name!r}, which isn't a column that is there before them")
    asked = {*needs.loss, *needs.advantages}
    if config.has_reference_service and schema.REF_LOGPROBS not in asked:
        raise ValueError(f'{who}: it needs no reference, but roles.reference.placement is "service": set "trainer"')
    if config.has_teacher and schema.TEACHER_LOGPROBS not in asked:
        raise ValueError(f"{who}: it needs no teacher, but roles.teacher.model names one: remove it")
    if config.rollout.return_routed_experts:
        asked.add(schema.ROUTED_EXPERTS)
    optional = asked & written
    own = {"advantage": (*needs.advantages, *(FILTER_COLUMNS if config.data.curriculum.filter else ()))}
    if any(source.sampling for source in config.data.sources):
        own["rollout"] = ("prompt",)  # it says how the answers of its source are sampled
    return tuple(_stage(name, optional, own.get(name, ())) for name in names)


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
