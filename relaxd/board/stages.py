"""The stages of the dataflow, with the columns that each needs and writes."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from relaxd.algorithms import create
from relaxd.algorithms.base import Candidates
from relaxd.board import schema
from relaxd.config import RunConfig
from relaxd.data.curriculum.own_filter import COLUMNS as FILTER_COLUMNS
from relaxd.roles import ROLES

PUBLISH = "publish"
"""Writer of the columns that a prompt has when it is published; it stands for the coordinator, not for a stage."""
SAMPLES = "samples"
"""Writer of the samples to show to people; it stands for the trainer, which writes them when it commits a step."""

TRAIN = "train"
"""Name of the last stage, the trainer, which commits steps to the ledger instead of columns."""


@dataclass(frozen=True)
class Stage:
    """A stage of the dataflow. A group is offered to it once all columns it needs are written."""

    name: str
    needs: tuple[str, ...]
    writes: tuple[str, ...]
    token_bytes: int = 0
    """Bytes per token of the columns that the stage writes, to estimate the sizes of groups."""


_NEEDS: dict[str, tuple[str, ...]] = {
    "rollout": ("prompt_tokens",),
    "reward": ("prompt", "sample_of_sequence", "lengths", "loss_mask", "text", "finish"),
    "reference": ("prompt_tokens", "tokens", "lengths", "loss_mask", "shares_prompt"),
    "teacher": ("prompt_tokens", "tokens", "lengths", "loss_mask", "shares_prompt"),
    "critic": ("prompt_tokens", "tokens", "lengths", "loss_mask", "shares_prompt"),
    "advantage": ("reward", "sample_of_sequence", "lengths"),
}
"""Names of the columns that each stage before the trainer needs in every run, by stage."""


def _stage(
    name: str,
    optional: Collection[str],
    needs: Sequence[str] = (),
    candidates: Candidates | None = None,
    *,
    before: Collection[str] = tuple(_NEEDS),
) -> Stage:
    """Return a stage with the columns that it reads and writes in a run with these optional columns.

    Args:
        name: the stage.
        optional: optional columns that the run has.
        needs: columns that only this run's stage needs.
        candidates: widths of the columns that have candidates for each token.
        before: the run's stages before the trainer, whose columns the trainer reads.
    """
    of_run = [c for c in schema.trained_columns(optional) if schema.COLUMNS[c].writer in (PUBLISH, *before)]
    common = tuple(of_run) if name == TRAIN else _NEEDS[name]
    writes = schema.written_by(name, optional)
    width, of_student = (candidates.width, candidates.top_k) if candidates is not None else (0, 0)
    return Stage(name, tuple(dict.fromkeys((*common, *needs))), writes, schema.token_bytes(writes, width, of_student))


STAGES: dict[str, Stage] = {name: _stage(name, ()) for name in (*_NEEDS, TRAIN)}
"""All stages by name, without optional columns. docs/columns.md says what a column holds."""


def stages_for(config: RunConfig) -> tuple[Stage, ...]:
    """Return the stages of a run, which follow from what its algorithm needs.

    There is no advantage stage if the advantages need a column that only the trainer computes, or log-probs of a
    reference service that adopts the policy's weights: the weights with which to score a group are known only once its
    step is known.

    Raises ValueError when the algorithm needs a column that isn't written by then, or its loss a column without a value
    for each token.
    """
    needs = create(config.algorithm).needs
    valued = config.roles.critic.placement == "service"
    absent = {"reference", "teacher"}.difference(config.frozen_roles("service")) | (set() if valued else {"critic"})
    names = [name for name in (*_NEEDS, TRAIN) if name not in absent]
    written = {c.name for c in schema.COLUMNS.values() if c.writer in (PUBLISH, *names) and c.writer != TRAIN}
    of_trainer = {name for role in config.frozen_roles("trainer") for name in schema.written_by(role, schema.COLUMNS)}
    before_advantages = written.difference(schema.written_by("advantage"))
    who = f"algorithm.name = {config.algorithm.name!r}"
    for name in needs.loss:
        if name not in {*written, *of_trainer} or schema.COLUMNS[name].shape not in ("T", "T, k"):
            raise ValueError(f"{who}: its loss needs {name!r}, which isn't a column of tokens that the run has")
    for name in needs.advantages:
        if name not in {*before_advantages, *of_trainer, schema.OLD_LOGPROBS}:
            raise ValueError(f"{who}: its advantages need {name!r}, which isn't a column that is there before them")
    asked = {*needs.loss, *needs.advantages}
    if "reference" in config.frozen_roles("service") and schema.REF_LOGPROBS not in asked:
        raise ValueError(f'{who}: it needs no reference, but roles.reference.placement is "service": set "trainer"')
    if valued and not needs.values:
        raise ValueError(f'{who}: it trains no critic, but roles.critic.placement is "service": set "trainer"')
    of_teacher = asked.intersection(schema.written_by("teacher", schema.COLUMNS))
    if "teacher" in config.frozen_roles() and not of_teacher:
        raise ValueError(f"{who}: it needs no teacher, but roles.teacher.model names one: remove it")
    candidates = needs.candidates
    if (candidates is not None) != (schema.CANDIDATES in asked):
        raise ValueError(f"{who}: Needs.candidates says what the column {schema.CANDIDATES!r} has: give both or none")
    if candidates is not None and candidates.of != "teacher":
        if problem := config.student_candidates_problem:
            raise ValueError(f"{who}: it compares the likeliest tokens of the student, but {problem}")
        if schema.CANDIDATES in written:
            asked.add(schema.STUDENT_CANDIDATES)
    if config.rollout.return_routed_experts:
        asked.add(schema.ROUTED_EXPERTS)
    if config.has_privileged_teacher and "teacher" in config.frozen_roles("trainer"):
        asked.add(schema.TEACHER_PROMPT_TOKENS)
    asked |= set(schema.written_by("critic", schema.COLUMNS)) if valued else set()
    known_late = set(needs.advantages) - before_advantages
    if "reference" in config.frozen_roles("service") and config.roles.reference.refresh_every:
        asked.add(schema.REFERENCE_WEIGHTS)
        known_late |= {schema.REF_LOGPROBS}.intersection(needs.advantages)
    if known_late:
        names.remove("advantage")
    partial = config.rollout.partial
    asked |= {schema.CONTINUED} if partial.enabled else set()
    asked |= {schema.OFF_POLICY_TOKENS} if partial.mask_off_policy else set()
    asked |= {schema.WEIGHT_RECEIPTS} if config.weights.has_receipts else set()
    asked |= set(schema.OF_CONVERSATIONS) if config.agent.is_there else set()
    of_prompts = schema.OF_MEDIA if config.has_media else ()
    of_sequences = schema.OF_SEQUENCE_MEDIA if config.agent.is_there and config.has_media else ()
    asked |= {*of_prompts, *of_sequences}
    credit = config.agent.credit
    if credit != "sample" and (needs.values or "advantage" not in names):
        raise ValueError(f'{who}: agent.credit is "{credit}", but its advantages come from the trainer; use "sample"')
    asked |= set(schema.OF_CREDIT[credit])
    optional = asked & written
    trained = optional if config.trainer.routing_replay == "rollout" else optional - {schema.ROUTED_EXPERTS}
    own: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
    own["advantage"] = (*needs.advantages, *(FILTER_COLUMNS if config.data.curriculum.filter else ()))
    own["advantage"] += schema.OF_CREDIT[credit]
    if config.has_privileged_teacher:
        own["teacher"] += (schema.TEACHER_PROMPT_TOKENS,)
    if schema.STUDENT_CANDIDATES in asked:
        own["teacher"] += (schema.STUDENT_CANDIDATES,)
    if config.roles.teacher.models:
        own["teacher"] += ("prompt",)  # it says which source the group is of
    if partial.mask_off_policy:
        own["reward"] += (schema.OFF_POLICY_TOKENS,)  # the model wrote them, too
    if config.reward.media:
        own["reward"] += (*of_prompts, *of_sequences)
    if any(source.sampling for source in config.data.sources) or config.agent.is_there:
        own["rollout"] += ("prompt",)  # it says how the answers of its source are sampled, and what environments get
    own["rollout"] += of_prompts
    for name in ("reference", "teacher"):
        own[name] += (*of_prompts, *of_sequences)
    if config.agent.is_there:
        own["reward"] += (schema.RESPONSE_MESSAGES, schema.ENVIRONMENT_REWARD, schema.ENVIRONMENT_INFO)
    return tuple(
        _stage(name, trained if name == TRAIN else optional, own[name], candidates, before=names) for name in names
    )


def roles_for(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the roles that a run needs: the roles of its stages, and the roles that these call."""
    stages = [stage.name for stage in stages_for(config)]
    return tuple(
        role.name
        for role in ROLES.values()
        if any(role.works_on(stage, config) for stage in stages) or role.needed(config)
    )


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
