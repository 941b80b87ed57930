"""`relaxd fork`: train a run's recorded steps again under other settings, without generating."""

import json
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from relaxd.cli.execute import check_run_id, free_folder, new_run_id, with_absolute_paths
from relaxd.cli.options import FolderOption, RunIdOption, RunNameArgument, new_console
from relaxd.cli.preparing.config_command import check_algorithm
from relaxd.cli.preparing.reward_command import score_groups
from relaxd.cli.reading.run_tables import metrics_tables, shown_metrics
from relaxd.cli.run_checkpoints import REPLAY_SECONDS, config_of, run_folder, steps_done
from relaxd.client import CliError
from relaxd.client.folder_runs import step_lines
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, Problem, load, suggest
from relaxd.config.settings_table import sections
from relaxd.config.write_toml import dump, dump_changes, toml
from relaxd.local.programs import FORK, run_program, stream_program
from relaxd.run_folder import (
    CONFIG,
    EFFECTIVE_SIZE,
    METRICS,
    RECORD,
    REWARDS,
    Fork,
    replace_file,
    with_original,
    write_fork,
)

CHANGEABLE = ("algorithm", "reward", "trainer.optimizer", "trainer.epochs", "roles.reference", "roles.teacher")
"""Names of the settings, or sections of settings, that a fork may change."""
RECORDED = {
    "model": "the weights are the run's",
    "data": "its prompts are recorded",
    "rollout": "its answers are recorded",
    "agent": "its conversations are recorded",
    "trainer": "its steps keep their groups and their division into micro-batches",
}
"""Reasons why a fork can't change a section's settings, by section."""
RENEWED = ("algorithm", "reward")
"""Sections that a fork resets to their defaults if it changes their `name`."""
LOW_SHARE, FAR_DRIFT = 0.8, 1.0
"""Limits beyond which a fork warns that the recorded answers are far from its policy. LOW_SHARE: minimum effective
sample size, as a share of tokens. FAR_DRIFT: maximum mean of a token's absolute log-ratio, which shows the distance
even if nearly all ratios are clamped."""


def fork(
    run_id: RunNameArgument,
    step: Annotated[int, typer.Option(min=0, help="Step after which the weights are taken; 0: the initial model.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train; default: all that are recorded.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Setting to change, as NAME=VALUE; repeatable.")
    ] = None,
    fork_id: RunIdOption = "",
    folder: FolderOption = None,
) -> None:
    """Train a run's recorded steps again under another loss, advantage, reward or learning rate, without generating.

    Example: relaxd fork RUN --step 0 --set algorithm.name=gspo --set trainer.optimizer.lr=2e-6
    """
    original = run_folder(run_id, folder)
    done = steps_done(original)
    last = done if steps is None else step + steps
    if not step < last <= done:
        problem = f"no step after step {step} to train" if step >= done else f"no step {last} to train"
        raise CliError(f"run {run_id} has done {done} steps: there is {problem}")
    before = config_of(original)
    config = changed_config(before, changes or [], run_id)
    fork_id = fork_id or new_run_id(f"{original.name}-fork")
    check_run_id(fork_id)
    out = free_folder(original.parent, fork_id)
    words = ["--run-folder", str(original), "--start", str(step), "--last", str(last)]
    rewards = _new_rewards(config, words) if config.reward != before.reward else []
    _begin(out, config, Fork(original.name, str(original), step, tuple(changes or ())), rewards)
    created = datetime.now(UTC)
    try:
        run_program(FORK, [*words, "--out", str(out)], seconds=REPLAY_SECONDS)
    except CliError as error:
        if (out / METRICS).stat().st_size:
            _write_record(out, created, "FAILED", f"the fork failed: {error}")
        else:  # it was refused
            shutil.rmtree(out)
        raise
    _write_record(out, created, "STOPPED", f"forked from step {step} of run {original.name}, to step {last}")
    _print_result(out, new_console())


def changed_config(config: RunConfig, changes: Sequence[str], run_id: str) -> RunConfig:
    """Return a run's configuration with changes NAME=VALUE. Raises CliError, ConfigError if a change isn't possible."""
    if not changes:
        return config
    named = dict(_parsed(change) for change in changes)
    data: dict[str, Any] = tomllib.loads(dump_changes(config))
    for section in RENEWED:
        name = f"{section}.name"
        if name in named and named[name] != getattr(config, section).name:
            data[section] = {}
    text = "".join(f"{section} = {toml(values)}\n" for section, values in data.items())
    try:
        changed = load(text, [f"--{name}={value}" for name, value in named.items()], name=f"run {run_id}")
    except ConfigError as error:
        raise ConfigError(
            [replace(one, source=re.sub("^--", "--set ", one.source)) for one in error.problems]
        ) from None
    changed = with_absolute_paths(changed)
    followed = (config.algorithm, config.reward)
    if config.agent.credit != "sample" and (changed.algorithm, changed.reward) != followed:
        raise CliError(
            f'run {run_id} has agent.credit = "{config.agent.credit}", whose advantages follow from columns that steps '
            "don't record: its fork can change trainer.optimizer only"
        )
    if changed.reward != config.reward and config.reward.media:
        raise CliError("a reward that opens media (reward.media) can't score recorded answers again")
    if problems := check_algorithm(changed):
        raise ConfigError(problems)
    return changed


def _parsed(change: str) -> tuple[str, str]:
    """Parse a change into name and value. Raises CliError, ConfigError if a fork can't make it."""
    name, equals, value = change.partition("=")
    if not equals:
        raise CliError(f"--set {change}: expected NAME=VALUE, such as trainer.optimizer.lr=1e-6")
    if not any(f"{name}.".startswith(f"{place}.") for place in CHANGEABLE):
        place = tuple(name.split("."))
        why = f": {RECORDED[place[0]]}" if place[0] in RECORDED else ""
        problem = f"can't be changed by a fork{why}; it can change {', '.join(CHANGEABLE)}"
        if place[0] not in {section[0] for section in sections()}:
            problem = f"is not a known setting; {suggest(place)}"
        raise ConfigError([Problem(name, problem, "--set")])
    return name, value


def _new_rewards(config: RunConfig, words: Sequence[str]) -> list[Mapping[str, Any]]:
    """Score the recorded answers with the fork's reward. Returns the lines of REWARDS, one a group. Raises CliError."""
    groups = list(stream_program(FORK, words, "", seconds=REPLAY_SECONDS))
    lines: list[Mapping[str, Any]] = []
    outcomes = iter(score_groups(config, [group["columns"] for group in groups]))
    for group in groups:
        scored = [next(outcomes) for _ in range(max(group["columns"]["sample_of_sequence"]) + 1)]
        if failed := next((one for one in scored if "error" in one), None):
            raise CliError(f"the reward can't score an answer of group {group['group']}: {failed['error']}")
        parts = dict.fromkeys(name for one in scored for name in one["parts"])
        columns = {name: [one["parts"].get(name) for one in scored] for name in parts}
        lines.append({"group": group["group"], "reward": [one["reward"] for one in scored], "reward_parts": columns})
    return lines


def _begin(out: Path, config: RunConfig, origin: Fork, rewards: Sequence[Mapping[str, Any]]) -> None:
    """Create a fork's folder with the files that it has before the first step: configuration, origin, rewards."""
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "config.toml", dump(config))
    replace_file(out / CONFIG, config.model_dump_json(indent=2) + "\n")
    write_fork(out, origin)
    if rewards:
        replace_file(out / REWARDS, "".join(json.dumps(line) + "\n" for line in rewards))
    (out / METRICS).touch()


def _write_record(out: Path, created: datetime, phase: str, reason: str) -> None:
    """Write the fork's run.json, by which commands find the fork among the runs."""
    record = {
        "run_id": out.name,
        "phase": phase,
        "outcome": "COMPLETED" if phase == "STOPPED" else None,
        "reason": reason,
        "create_time": created.isoformat(),
        "begin_time": created.isoformat(),
        "end_time": datetime.now(UTC).isoformat(),
    }
    replace_file(out / RECORD, json.dumps(record, indent=2) + "\n")


def _print_result(out: Path, console: Console) -> None:
    """Print the fork's metrics beside those of the original run, and a warning if the answers are far off-policy."""
    lines = list(with_original(out, step_lines(out)))
    known = sorted({name for line in lines for name in line})
    console.print(*metrics_tables(lines, shown_metrics(known), console.width), sep="\n")
    if warning := far_steps(lines):
        console.print(warning, style="yellow", soft_wrap=True)
    console.print(f"the fork is {out}; relaxd report {out} draws both runs", soft_wrap=True)


def far_steps(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning with the number of steps whose recorded answers are far from the fork's policy; "" if none."""
    far = [
        line for line in lines if line.get(EFFECTIVE_SIZE, 1.0) < LOW_SHARE or line.get("policy_drift", 0.0) > FAR_DRIFT
    ]
    if not far:
        return ""
    lowest = min(line.get(EFFECTIVE_SIZE, 1.0) for line in far)
    return (
        f"the recorded answers are far from the fork's policy at {len(far)} of {len(lines)} steps, from step "
        f"{far[0]['step']} on: their effective sample size is down to {lowest:.0%} of the tokens. From there the "
        "curves say little about a run with these settings; fewer steps (--steps) or a lower learning rate stay closer"
    )
