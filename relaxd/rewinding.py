"""Rewinds a run's folder to its state after an earlier step that has a checkpoint.

Later files are moved, not deleted: to `set-aside/after-step-N-TIME`, under the same names.
"""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relaxd.config import RunConfig
from relaxd.config.write_toml import dump
from relaxd.run_folder import (
    CHECKPOINT_STATE,
    CHECKPOINTS,
    CONFIG,
    CURRICULUM,
    EVALUATIONS,
    GROUPS,
    LEDGER,
    METRICS,
    MODELS,
    RECORD,
    SAMPLES,
    STEPS,
    SUMMARY,
    checkpoint_path,
    checkpoint_steps,
    critic_folder,
    holder_of,
    parse_line,
    replace_file,
)

SET_ASIDE = "set-aside"
"""Subfolder of a run's folder with the files that rewinding moved away."""
OF_STEPS = (STEPS, "reference", MODELS, EVALUATIONS, f"{EVALUATIONS}/*", CHECKPOINTS, f"critic/{CHECKPOINTS}")
"""Folders of a run with one file or folder per step, named step-NUMBER. Step files must be moved first, because a step
file beyond the ledger's end counts as a step."""
OF_THE_END = (SUMMARY, "model", "report.html", "curve.png", CURRICULUM)
"""Files and folders of a run that are written when it ends, or that relaxd regenerates from other files."""
LINES = (METRICS, SAMPLES, GROUPS)
"""Files with lines in step order; rewinding cuts off the lines of later steps."""


class NoWayBack(Exception):
    """A run can't be rewound to a step. The message says why."""


def rewind(folder: Path, step: int, *, reset_moments: bool = False) -> Path:
    """Reset a run's folder to its state after a step, so that the run can continue.

    Returns the folder to which it moved the later files. If it is interrupted, call it again. No coordinator may work
    on the run, and no Redis may contain it.

    Args:
        folder: the run's folder.
        step: the step, of which there is a checkpoint.
        reset_moments: whether AdamW's moments start anew after it (trainer.reset_moments_after).

    Raises:
        NoWayBack: there is no checkpoint of this step, or a coordinator works on the run.
        OSError: a file can't be moved.
    """
    check_way_back(folder, step)
    aside = folder / SET_ASIDE / f"after-step-{step:06d}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    aside.mkdir(parents=True)
    for pattern in OF_STEPS:
        for parent in folder.glob(pattern):
            late = [path for path in parent.glob("step-*") if _step_of(path) > step]
            for path in sorted(late, key=_step_of, reverse=True):  # so that no file is left behind a gap
                _move(path, folder, aside)
        if pattern == STEPS:
            _cut(folder / LEDGER, aside, lambda line: int(line.get("step", 0)) > step)
    for name in LINES:
        _cut(folder / name, aside, lambda line: int(line.get("step") or 0) > step)
    for name in OF_THE_END:
        if (folder / name).exists():
            _move(folder / name, folder, aside)
    _continue(folder, aside, step, reset_moments=reset_moments)
    return aside


def check_way_back(folder: Path, step: int) -> None:
    """Check that a run can be rewound to a step. Raises NoWayBack.

    No coordinator may work on the run, and the trainer and the critic service, if any, need checkpoints of the step.
    """
    holder = holder_of(folder)
    if holder is not None:
        raise NoWayBack(f"the coordinator of stack {holder} works on the run in {folder}: stop the run first")
    for owner, of in ((folder, ""), (critic_folder(folder), " of the critic")):
        steps = checkpoint_steps(owner)
        if step in steps and (checkpoint_path(owner, step) / CHECKPOINT_STATE).is_file():
            continue
        if of and not steps:
            continue  # the run has no critic service
        there = ", ".join(map(str, reversed(steps))) or "none"
        raise NoWayBack(f"{folder} has no checkpoint{of} of step {step}: there are checkpoints of steps {there}")


def _step_of(path: Path) -> int:
    """Return the step in a file's name, such as 20 for step-000020.safetensors; 0 if the name has no step."""
    digits = path.name.removeprefix("step-").partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _move(path: Path, folder: Path, aside: Path) -> None:
    target = aside / path.relative_to(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(path, target)


def _cut(path: Path, aside: Path, is_late: Callable[[dict[str, Any]], bool]) -> None:
    """Cut a file before the first line for which `is_late` is true; first link the whole file into `aside`."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        end = 0
        for line in file:
            found = parse_line(line)
            if found is not None and is_late(found):
                break
            end += len(line)
        else:
            return
        temporary = path.with_suffix(".tmp")
        file.seek(0)
        with temporary.open("wb") as kept:
            while end and (block := file.read(min(end, 1 << 20))):
                end -= kept.write(block)
            kept.flush()
            os.fsync(kept.fileno())
    os.link(path, aside / path.name)
    os.replace(temporary, path)


def _continue(folder: Path, aside: Path, step: int, *, reset_moments: bool) -> None:
    """Rewrite run.json so that the run can continue after `step`; old versions of changed files go to `aside`.

    `reset_moments` adds the step to trainer.reset_moments_after, in the configuration files too.
    """
    path = folder / RECORD
    record = json.loads(path.read_bytes())
    if reset_moments:
        config = RunConfig.model_validate_json(record["config_json"])
        steps = tuple(sorted({*config.trainer.reset_moments_after, step}))
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"reset_moments_after": steps})})
        record["config_json"] = config.model_dump_json()
        _replace(folder / CONFIG, aside, config.model_dump_json(indent=2) + "\n")
        _replace(folder / "config.toml", aside, dump(config))
    record |= {"phase": "RUNNING", "outcome": None, "reason": "", "end_time": None, "stop_reason": "", "paused": None}
    record |= {"board_bytes": 0, "evaluating": 0, "patience_from": step}
    record["evaluations"] = [one for one in record["evaluations"] if one["step"] <= step]
    _replace(path, aside, json.dumps(record, indent=2) + "\n")


def _replace(path: Path, aside: Path, text: str) -> None:
    os.link(path, aside / path.name)
    replace_file(path, text)
