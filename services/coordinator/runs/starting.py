"""Everything that is checked before a run exists."""

import contextlib
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from relaxd.board import Board, BoardUnavailable, size_problems
from relaxd.config import RunConfig
from relaxd.config.load import ConfigError, load
from relaxd.data.dataset import RunData, load_data
from relaxd.data.errors import DataError
from relaxd.rpc.errors import FailedPrecondition, Unavailable, Violations
from services.coordinator.runs.run_files import RunFiles
from services.coordinator.state.records import RunRecord

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RUN_ID_RULE = "must be 1 to 64 letters, digits, dots, dashes and underscores, the first one a letter or digit"
RESERVED = "coordinator"
"""The board's keys start with relaxd:RUN_ID, and those of this name are the coordinator's own."""


@dataclass(frozen=True)
class Prepared:
    """A run that can be started."""

    record: RunRecord
    config: RunConfig
    data: RunData
    files: RunFiles
    warnings: tuple[str, ...] = ()
    """What may hold the run up later."""


def check_run_id(run_id: str, violations: Violations, *, optional: bool = True) -> None:
    """Check an id that came with a request."""
    if run_id or not optional:
        violations.check(RUN_ID.fullmatch(run_id) is not None and run_id != RESERVED, "run_id", RUN_ID_RULE)


def prepare(run_id: str, config_toml: str, redis_url: str) -> Prepared:
    """Check a configuration, and read and check the data that it names. Slow: call it from a thread.

    Raises InvalidArgument, naming every setting that is wrong; FailedPrecondition: the run's folder is in use, or Redis
    is not set up for it; Unavailable: Redis doesn't answer.
    """
    violations = Violations()
    check_run_id(run_id, violations)
    violations.check(bool(config_toml.strip()), "config_toml", "is empty: give the run's configuration as TOML")
    violations.raise_if_any()
    try:
        config = load(config_toml)
    except ConfigError as error:
        for problem in error.problems:
            violations.add(_field(problem.setting), str(problem))
        raise violations.error() from error
    try:
        data = load_data(config)
    except DataError as error:
        violations.add(_field(error.field), error.message)
        raise violations.error() from error
    if config.eval.prompts and data.held_out is None:
        violations.add(_field("eval.prompts"), "nothing is held out: set data.eval_path, or eval.prompts = 0")
        violations.raise_if_any()
    warnings = _check_sizes(config, data, redis_url)
    run_id = run_id or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(config.run.folder).expanduser().resolve() / run_id
    if any((folder / name).exists() for name in ("config.json", "metrics.jsonl", "steps")):
        raise FailedPrecondition(f"{folder} has the files of an earlier run: choose another run_id, or move them away")
    record = RunRecord(run_id=run_id, config_json=config.model_dump_json(), folder=str(folder))
    files = RunFiles(folder)
    try:
        files.create(config_toml, config)
    except OSError as error:
        violations.add(_field("run.folder"), f"can't write to {folder}: {error.strerror or error}")
        raise violations.error() from error
    return Prepared(record, config, data, files, warnings)


def _check_sizes(config: RunConfig, data: RunData, redis_url: str) -> tuple[str, ...]:
    """Refuse a run whose steps can't fit into Redis; returns what may become a problem."""
    with contextlib.closing(Board(redis_url, "sizes", (), config.board)) as board:
        try:
            memory = board.memory()
        except BoardUnavailable as error:
            raise Unavailable(str(error)) from error
    problems = size_problems(config, expert_bytes=data.expert_bytes, memory=memory)
    violations = Violations()
    for problem in problems:
        if problem.fatal and not problem.setting:
            raise FailedPrecondition(problem.message)
        if problem.fatal:
            violations.add(_field(problem.setting), problem.message)
    violations.raise_if_any()
    return tuple(f"{problem.setting} {problem.message}" for problem in problems)


def _field(setting: str) -> str:
    """The name of a setting in a field violation."""
    return f"config_toml.{setting}" if setting else "config_toml"
