"""Restoring a run from its folder after Redis lost it.

The coordinator wrote run.json (the record) and ledger.jsonl (the steps); the trainer wrote state.json of the newest
checkpoint (data cursor and open groups) and the step files after the ledger's last line. Groups that no step trained
are published again, and so are groups dropped since the checkpoint.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relaxd.board import LedgerEntry
from relaxd.board.sides.coordinator_side import LEDGER_STEPS
from relaxd.board.sides.side_base import RUN_ID_RULE
from relaxd.config import RunConfig
from relaxd.data.dataset import Cursor, PromptDataset, RunData, load_data
from relaxd.models import DataError
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument, Violations
from relaxd.run_folder import (
    CHECKPOINT_STATE,
    CHECKPOINTS,
    LEDGER,
    RECORD,
    STEPS,
    checkpoint_path,
    checkpoint_steps,
    critic_folder,
)
from services.coordinator.runs.publisher import place_of
from services.coordinator.runs.run_files import RunFiles
from services.coordinator.runs.starting import NEW_DATA_AND_CURRICULUM, check_run_id, check_same_prompts
from services.coordinator.state.records import Outcome, Phase, RunRecord

SKIPPED_TRAINER_TERMS = 16
"""Number of trainer terms to skip in a restored run. Trainers of these terms may have left no trace in the folder, and
must not commit again."""


@dataclass(frozen=True)
class Restored:
    """A run read from its folder."""

    record: RunRecord
    config: RunConfig
    data: RunData
    files: RunFiles
    ledger: list[LedgerEntry]
    cursor: Cursor
    dropped: dict[str, int]
    trainer_term: int


def read_run(folder_name: str, steps: int = 0, *, new_data: bool = False) -> Restored:
    """Read a run's folder. Slow: call it from a thread.

    The restored run is not paused. `steps`: new number of steps, with which an ended run continues; 0 keeps the number.
    A run that failed because of its data continues without a new number. With `new_data` the prompts may differ from
    before: the run continues with the first prompt of the next epoch.

    Raises InvalidArgument: it isn't a run's folder, or it has done `steps`; FailedPrecondition: the run has ended, or
    a file is damaged.
    """
    folder = Path(folder_name)
    if not folder.is_absolute() or not folder_name.isprintable():
        raise _invalid(f"is {folder_name!r}: it must be an absolute path")
    for name in (RECORD, LEDGER, CHECKPOINTS, STEPS):
        try:
            inside = (folder / name).resolve().is_relative_to(folder.resolve())
        except (OSError, RuntimeError):  # circular links
            inside = False
        if not inside:
            raise _invalid(f"is {folder_name!r}: its {name} is a link to the outside")
    try:
        record = RunRecord.model_validate_json((folder / RECORD).read_bytes())
        config = RunConfig.model_validate_json(record.config_json)
    except FileNotFoundError as error:
        raise _invalid(f"is {folder_name!r}: it contains no {RECORD}, so it isn't the folder of a run") from error
    except (OSError, ValidationError) as error:
        raise _invalid(f"is {folder_name!r}: its {RECORD} can't be read: {error}") from error
    violations = Violations()
    check_run_id(record.run_id, violations, optional=False)
    if violations.found:
        raise _invalid(f"is {folder_name!r}: its run id is {record.run_id!r}: it {RUN_ID_RULE}")
    if record.phase.ended and not steps and record.outcome != Outcome.DATA_FAILED:
        state = record.phase.value.lower()
        raise FailedPrecondition(
            f"run {record.run_id!r} has ended ({state}: {record.reason}): only more steps let it go on (`steps`)",
            reason="RUN_ENDED",
            subject=record.run_id,
        )
    if new_data and config.data.curriculum.chooses:
        raise FailedPrecondition(
            f"run {record.run_id!r} has a curriculum: put its earlier prompts back, or {NEW_DATA_AND_CURRICULUM}"
        )
    try:
        data = load_data(config)
        if not new_data:
            check_same_prompts(record, config, data.train)
        prompts_digest = data.train.digest
    except DataError as error:
        raise FailedPrecondition(f"run {record.run_id!r} can't be restored: {error}") from error
    ledger = read_ledger(folder)
    checkpoint = _newest_checkpoint(folder, len(ledger))
    config = _extended(config, steps, len(ledger), folder) if steps else config
    board = checkpoint.get("board", {})
    terms = [entry.term for entry in ledger] + [int(checkpoint.get("term", 0))]
    return Restored(
        record=_continued(record, len(ledger)).model_copy(
            update={
                "folder": str(folder.resolve()),
                "config_json": config.model_dump_json(),
                "prompts": data.train.prompts,
                "prompts_digest": prompts_digest,
            }
        ),
        config=config,
        data=data,
        files=RunFiles(folder),
        ledger=ledger,
        cursor=_next_epoch(board, ledger)
        if new_data
        else _cursor(data.train, board, ledger[int(checkpoint.get("step", 0)) :]),
        dropped={str(reason): int(count) for reason, count in board.get("dropped_by_reason", {}).items()},
        trainer_term=max(terms) + SKIPPED_TRAINER_TERMS,
    )


def _continued(record: RunRecord, steps: int) -> RunRecord:
    """Return the record with which a run continues after step `steps`. The pause, the outcome and the evaluations of
    later steps are cleared."""
    changes: dict[str, Any] = {"begin_time": datetime.now(UTC), "paused": None, "evaluating": 0}
    changes["evaluations"] = tuple(one for one in record.evaluations if one.step <= steps)
    changes |= {"forgiven_drops": 0, "forgiven_filtered": 0}
    if record.phase.ended:
        changes |= {"phase": Phase.RUNNING if steps else Phase.PENDING, "outcome": None, "reason": "", "end_time": None}
        changes |= {"stop_reason": "", "board_bytes": 0, "patience_from": steps}
        changes |= {"failed_role": "", "failed_instance": ""}
    return record.model_copy(update=changes)


def _extended(config: RunConfig, steps: int, done: int, folder: Path) -> RunConfig:
    """Return the configuration with a new number of steps."""
    if steps <= done:
        raise InvalidArgument(f"steps is {steps}: the run has done {done}", [("steps", f"must be above {done}")])
    learners = [("", config.trainer.optimizer.schedule, folder)]
    if config.roles.critic.placement == "service":
        learners.append((" of the critic", config.roles.critic.optimizer.schedule, critic_folder(folder)))
    for of, schedule, where in learners:
        checkpoint = int(_newest_checkpoint(where, done).get("step", 0))
        if schedule != "constant" and steps != config.run.steps and checkpoint < done:
            raise FailedPrecondition(
                f'the learning rate{of} decays over run.steps (schedule = "{schedule}"), and there is no checkpoint'
                f"{of} of step {done}: the steps after the one of step {checkpoint} can't be repeated with another "
                "number of steps"
            )
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


def _cursor(prompts: PromptDataset, board: dict[str, Any], trained_since: Sequence[LedgerEntry]) -> Cursor:
    """Return the data position from which the run resumes: first the checkpoint's open groups, then the prompts after
    its cursor, except groups trained since."""
    return prompts.resumed(
        Cursor.from_json(board.get("cursor")),
        {place_of(group_id) for group_id in board.get("open_groups", ())},
        {place_of(group_id) for entry in trained_since for group_id in entry.plan["groups"]},
    )


def _next_epoch(board: dict[str, Any], ledger: Sequence[LedgerEntry]) -> Cursor:
    """Return the start of the first epoch without published groups. New prompts need a new epoch because group ids
    contain epoch and position."""
    trained = (place_of(group_id)[0] for entry in ledger for group_id in entry.plan["groups"])
    return Cursor(epoch=1 + max((Cursor.from_json(board.get("cursor")).epoch, *trained)))


def read_ledger(folder: Path) -> list[LedgerEntry]:
    """Read ledger.jsonl, and the step files beyond it. An incomplete last line is skipped.

    Steps before the last LEDGER_STEPS, which the board doesn't keep, have no metrics and only the groups of their plan:
    a whole plan may have hundreds of kilobytes.
    """
    entries: list[LedgerEntry] = []

    def add(entry: LedgerEntry) -> None:
        entries.append(entry)
        if len(entries) > LEDGER_STEPS:
            old = entries[-LEDGER_STEPS - 1]
            entries[-LEDGER_STEPS - 1] = replace(old, plan={"groups": old.plan["groups"]}, metrics={})

    for entry in _lines_of_ledger(folder / LEDGER):
        add(entry)
    # The step file is written before its step is committed. If the commit is missing, the step's weights
    # were never announced, so it is safe to count the step as committed.
    while (file := folder / STEPS / f"step-{len(entries) + 1:06d}.safetensors").is_file():
        plan = _plan_of(file)
        time = file.stat().st_mtime
        add(LedgerEntry(step=len(entries) + 1, time=time, term=plan["term"], plan=plan, metrics={}))
    return entries


def _lines_of_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield the steps of ledger.jsonl, one in memory at a time. Raises FailedPrecondition if the file is damaged."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = LedgerEntry(**json.loads(line))
            except (ValueError, TypeError) as error:
                if next(file, None) is None:
                    return
                raise FailedPrecondition(f"{path} is damaged in line {number}: {error}") from error
            if entry.step != number:
                raise FailedPrecondition(f"{path} has step {entry.step} in line {number}: it must be {number}")
            yield entry


def _plan_of(step_file: Path) -> dict[str, Any]:
    """Read a step's plan from the header of its safetensors file: 8 bytes with the length of the JSON that follows."""
    try:
        with step_file.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 30)))
        plan: dict[str, Any] = json.loads(header["__metadata__"]["plan"])
        if not isinstance(plan["groups"], list) or not isinstance(plan["term"], int):
            raise ValueError("its plan has no groups")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise FailedPrecondition(f"{step_file} is damaged: {error}") from error
    return plan


def _newest_checkpoint(folder: Path, last_step: int) -> dict[str, Any]:
    """Return state.json of the newest checkpoint within the ledger; {} without one."""
    for step in checkpoint_steps(folder):
        try:
            state: dict[str, Any] = json.loads((checkpoint_path(folder, step) / CHECKPOINT_STATE).read_text())
        except (OSError, ValueError):
            continue  # the trainer moves it aside and logs it
        if state["step"] <= last_step:
            return state
    return {}


def _invalid(text: str) -> InvalidArgument:
    return InvalidArgument(f"folder {text}", [("folder", text)])
