"""Checks and preparation of a new run."""

import contextlib
import hashlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from relaxd.algorithms.algorithm_trial import create_tried
from relaxd.board import Board, BoardUnavailable, message_problem, size_problems, stages_for
from relaxd.board.sides.side_base import RESERVED_RUN_ID, RUN_ID, RUN_ID_RULE
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, load
from relaxd.config.section import with_setting
from relaxd.data.curriculum.run_curriculum import own_problems
from relaxd.data.dataset import PromptDataset, RunData, load_data
from relaxd.data.templating import with_template_texts
from relaxd.evaluation.set_checks import environment_problems, set_problems
from relaxd.models import DataError
from relaxd.rpc.client import MAX_MESSAGE_BYTES
from relaxd.rpc.errors import FailedPrecondition, Unavailable, Violations
from relaxd.run_folder import earlier_use_of, held_use_of
from services.coordinator.runs.run_files import FolderHeld, RunFiles, held_folder
from services.coordinator.state.records import RunRecord


@dataclass(frozen=True)
class Prepared:
    """A checked run with its data and folder, ready to start."""

    record: RunRecord
    config: RunConfig
    data: RunData
    files: RunFiles
    held: contextlib.ExitStack
    """Context whose end releases the run's folder."""
    warnings: tuple[str, ...] = ()
    """Sentences about problems that don't prevent the start but may delay the run later."""


def check_run_id(run_id: str, violations: Violations, *, optional: bool = True) -> None:
    """Check the run id in a request, adding to `violations` if it is invalid. With `optional` it may be empty."""
    if run_id or not optional:
        violations.check(RUN_ID.fullmatch(run_id) is not None and run_id != RESERVED_RUN_ID, "run_id", RUN_ID_RULE)


def prepare(run_id: str, config_toml: str, request_id: str, redis_url: str, stack: str) -> Prepared:
    """Check a StartRun request, load its data and create the run's folder, held for `stack`. Slow: call it in a thread.

    Raises InvalidArgument, naming every wrong setting; FailedPrecondition: the run's folder is in use, or Redis is not
    configured for it; Unavailable: Redis doesn't answer.
    """
    violations = Violations()
    check_run_id(run_id, violations)
    violations.check(not request_id or RUN_ID.fullmatch(request_id), "request_id", RUN_ID_RULE)
    violations.check(bool(config_toml.strip()), "config_toml", "is empty: it must be the run's configuration as TOML")
    violations.raise_if_any()
    try:
        config = load(config_toml)
    except ConfigError as error:
        for problem in error.problems:
            violations.add(_field(problem.setting), str(problem))
        raise violations.error() from error
    for setting, message in environment_problems(config):
        violations.add(_field(setting), message)
    violations.raise_if_any()
    try:
        create_tried(config.algorithm, with_loss=False)
        stages_for(config)
    except ValueError as error:
        violations.add(_field("algorithm.name"), str(error))
        raise violations.error() from error
    try:
        config = with_template_texts(config, sent=True)
        data = load_data(config)
        prompts_digest = data.train.digest
    except DataError as error:
        violations.add(_field(error.field), error.message)
        raise violations.error() from error
    for field, message in [*set_problems(config, data.evaluation), *own_problems(config, data.train)]:
        violations.add(_field(field), message)
    violations.raise_if_any()
    digest = request_digest(run_id, config_toml)
    run_id = run_id or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    warnings = _check_sizes(run_id, config, data, redis_url)
    folder = Path(config.run.folder).expanduser().resolve() / run_id
    record = RunRecord(
        run_id=run_id,
        config_json=config.model_dump_json(),
        folder=str(folder),
        request_id=request_id,
        request_digest=digest,
        prompts=data.train.prompts,
        prompts_digest=prompts_digest,
    )
    files = RunFiles(folder)
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(held_folder(folder, stack))
            if use := earlier_use_of(folder):
                raise FailedPrecondition(use, reason="FOLDER_IN_USE", subject=str(folder))
            files.create(config_toml, config)
        except FolderHeld as error:
            use = held_use_of(folder, error.holder)
            raise FailedPrecondition(use, reason="FOLDER_IN_USE", subject=str(folder)) from error
        except OSError as error:
            violations.add(_field("run.folder"), f"can't write to {folder}: {error.strerror or error}")
            raise violations.error() from error
        return Prepared(record, config, data, files, held.pop_all(), warnings)


NEW_DATA_AND_CURRICULUM = (
    "begin a new run with the model that this one has exported: a curriculum knows prompts by their rows, so the run "
    "can't go on with others"
)
"""Advice for a run with a curriculum, in place of --new-data."""


def check_same_prompts(record: RunRecord, config: RunConfig, train: PromptDataset) -> None:
    """Check that a run would continue with the prompts with which it began. Raises DataError."""
    if not record.prompts or (record.prompts, record.prompts_digest) == (train.prompts, train.digest):
        return
    changed = (
        f"there are {train.prompts} prompts, and the run began with {record.prompts}"
        if train.prompts != record.prompts
        else f"the {train.prompts} prompts are others than those that the run began with, or in another order"
    )
    otherwise = f"continue with these from the first one: relaxd resume {record.run_id} --new-data"
    if config.data.curriculum.chooses:
        otherwise = NEW_DATA_AND_CURRICULUM
    raise DataError(
        "data", f"{changed}, so it can't go on where it stopped. Put the earlier prompts back, or {otherwise}"
    )


def request_digest(run_id: str, config_toml: str) -> str:
    """Return the SHA-256 of a StartRun request's content."""
    return hashlib.sha256(f"{run_id}\n{config_toml}".encode()).hexdigest()


def _check_sizes(run_id: str, config: RunConfig, data: RunData, redis_url: str) -> tuple[str, ...]:
    """Check that the run's steps fit into Redis, and its media into messages; returns warnings."""
    with contextlib.closing(Board(redis_url, run_id, (), config.board)) as board:
        try:
            nodes = board.data_node_problems()
            memory = board.memory()
        except BoardUnavailable as error:
            raise Unavailable(str(error)) from error
    problems = list(size_problems(config, expert_bytes=data.expert_bytes, memory=memory))
    if of_message := message_problem(config, MAX_MESSAGE_BYTES):
        problems.append(of_message)
    violations = Violations()
    for node in nodes:
        violations.add(_field("board.data_urls"), node)
    for problem in problems:
        if problem.fatal and not problem.setting:
            raise FailedPrecondition(problem.message)
        if problem.fatal:
            violations.add(_field(problem.setting), problem.message)
    violations.raise_if_any()
    return tuple(with_setting(problem.setting, problem.message) for problem in problems)


def _field(setting: str) -> str:
    """Return the request field that a violation names for a setting, such as config_toml.data.path."""
    return f"config_toml.{setting}" if setting else "config_toml"
