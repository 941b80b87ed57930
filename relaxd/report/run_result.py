"""The result of a run, read from its folder: its steps, its files, and its evaluations as a table."""

import heapq
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relaxd.alerts.rules import RuleAlarm, RuleWatch, parse_rule
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.write_toml import dump_changes
from relaxd.evaluation.estimates import is_end, is_estimate, shown_name
from relaxd.logprob_gap import GapAlarm, GapWatch
from relaxd.run_folder import (
    CODE,
    EVALUATIONS,
    HELD_OUT,
    SUMMARY,
    answers_file,
    answers_folder,
    newest_samples,
    with_original,
)
from relaxd.v1 import coordinator_pb2 as pb

COUNTS = ("prompts", "unscored", "environment_failed", "turns_mean", "response_length", "truncated_share", "step")
"""Metrics of an evaluation set that are neither the reward, nor parts of it, nor pass@k or maj@k."""


@dataclass(frozen=True)
class SetRow:
    """The results of one evaluation on one evaluation set."""

    step: int
    """Step after which the model was evaluated; 0: the initial model."""
    name: str
    """Name of the evaluation set."""
    values: Mapping[str, float]
    """Metrics of the evaluation set, by the names that `summarise_set` gives, without the set's prefix."""

    @property
    def estimates(self) -> list[str]:
        """Names of the pass@k and maj@k metrics in the results, in order of k."""
        names = [name for name in self.values if is_estimate(name) and not is_end(name)]
        return sorted(names, key=_estimate_order)

    @property
    def parts(self) -> list[str]:
        """Names of the parts of the reward in the results."""
        return [name for name in self.values if name not in (*COUNTS, "reward") and not is_estimate(name)]

    def estimate(self, name: str) -> str:
        """Return a metric's value with its 95 % confidence interval as text, such as "0.420 [0.330, 0.520]"."""
        if (value := self.values.get(name)) is None:
            return ""
        low, high = self.values.get(f"{name}_low"), self.values.get(f"{name}_high")
        return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")


def _estimate_order(name: str) -> tuple[bool, int]:
    return name.startswith("maj"), int(name.rpartition("_")[2])


def set_rows(lines: Iterable[Mapping[str, Any]]) -> list[SetRow]:
    """Return the evaluations' results in lines of metrics.jsonl, ordered by set (the held-out prompts first), then
    step."""
    rows = []
    for line in lines:
        sets: dict[str, dict[str, float]] = {}
        for key, value in line.items():
            if value is None:
                continue
            if key.startswith("eval/"):
                _, name, metric = key.split("/", 2)
                sets.setdefault(name, {})[metric] = value
            elif key.startswith("eval_"):
                sets.setdefault(HELD_OUT, {})[key.removeprefix("eval_")] = value
        rows += [SetRow(int(line["step"]), name, values) for name, values in sets.items() if "reward" in values]
    return sorted(rows, key=lambda row: (row.name != HELD_OUT, row.name, row.step))


def table_of(rows: Iterable[SetRow]) -> tuple[list[str], list[list[str]]]:
    """Return a table of evaluation results: the columns' titles, and the cells of each row."""
    rows = list(rows)
    estimates = sorted({name for row in rows for name in row.estimates}, key=_estimate_order)
    unscored = any(row.values.get("unscored") for row in rows)
    titles = ["set", "step", "prompts", "reward", *map(shown_name, estimates), "length", "cut off"]
    cells = [
        [
            row.name,
            str(row.step),
            f"{row.values['prompts']:.0f}" if "prompts" in row.values else "",
            f"{row.values['reward']:.3f}",
            *map(row.estimate, estimates),
            f"{row.values['response_length']:.0f}" if "response_length" in row.values else "",
            f"{row.values['truncated_share']:.1%}" if "truncated_share" in row.values else "",
            *([f"{row.values.get('unscored', 0):.0f}"] if unscored else []),
        ]
        for row in rows
    ]
    return titles + (["unscored"] if unscored else []), cells


SHOWN_SAMPLES = 64


@dataclass(kw_only=True)
class RunResult:
    """The results of a run so far, read from the run's folder."""

    folder: Path
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    """The lines of metrics.jsonl: one per step, with the step's evaluation, if any. Step 0 has a line if the initial
    model was evaluated."""
    config_toml: str
    config: RunConfig | None
    """Configuration of the run; None if config.json is missing or from another version of relaxd."""
    code: dict[str, Any]
    """Version of the code that the run used, from code.json; empty if unknown."""
    samples: list[dict[str, Any]]

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return str(self.summary.get("run_id") or self.folder.name)

    @property
    def state(self) -> str:
        """State of the run and the state's reason, as text for display."""
        return f"{self.summary.get('state', '')} · {self.summary.get('reason', '')}".strip(" ·")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Metrics of each trained step, as lines of metrics.jsonl."""
        return [line for line in self.lines if line.get("step", 0) > 0 and line.get("reward_mean") is not None]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines with an evaluation of the held-out prompts: step, eval_reward, and eval_<part> for each part."""
        return [line for line in self.lines if line.get("eval_reward") is not None]

    @property
    def alarms(self) -> list[str]:
        """Texts of all alarms of the run, ended ones included; empty if the configuration is unknown."""
        if self.config is None:
            return []
        found: list[GapAlarm | RuleAlarm] = [*GapWatch(self.config).observe_all(self.lines)]
        for rule in self.config.alerts.rules:
            found += RuleWatch(parse_rule(rule)).observe_all(self.lines)
        return [f"steps {alarm.first_step} to {alarm.last_step}: {alarm.text}" for alarm in found]

    @property
    def set_rows(self) -> list[SetRow]:
        """Results of all evaluations of the run, ordered by set and step."""
        return set_rows(self.lines)

    @property
    def answered_sets(self) -> list[str]:
        """Names of the evaluation sets with stored answers, the held-out prompts first."""
        others = sorted(path.name for path in (self.folder / EVALUATIONS).glob("*/"))
        return [name for name in (HELD_OUT, *others) if self.evaluation_steps(name)]

    def evaluation_steps(self, name: str = HELD_OUT) -> list[int]:
        """Return the steps after which answers to an evaluation set were stored, in order."""
        names = [path.stem for path in answers_folder(self.folder, name).glob("step-*.jsonl")]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))

    @property
    def changes_toml(self) -> str:
        """Settings of the run that differ from the defaults, as TOML; empty if the configuration is unknown."""
        return dump_changes(self.config) if self.config is not None else ""

    def answers(self, step: int, name: str = HELD_OUT, limit: int | None = None) -> list[dict[str, Any]]:
        """Read the answers to an evaluation set after a step, in the prompts' order, at most `limit`. Raises
        CliError."""
        try:
            with answers_file(self.folder, name, step).open(encoding="utf-8") as file:
                lines = (json.loads(line) for line in file if line.strip())
                # The file, in the order in which answers came, may be larger than memory.
                return sorted(lines, key=place_of) if limit is None else heapq.nsmallest(limit, lines, key=place_of)
        except (OSError, ValueError, KeyError) as error:
            raise CliError(f"the answers of the evaluation of step {step} can't be read: {error}") from error

    def facts(self) -> dict[str, str]:
        """Return the run's model, data and main settings as texts for display, by name."""
        facts = {}
        if config := self.config:
            source = config.data.source
            task = config.data.path or (config.data.reasoning_gym.task if source == "reasoning_gym" else "")
            facts = {
                "model": config.model.path,
                "data": f"{source} {task}".strip(),
                "reward": config.reward.shown,
                "algorithm": config.algorithm.name,
                "engine": config.rollout.engine,
            }
        if code := self.code:
            commit = f", commit {code['commit'][:12]}" if code.get("commit") else ""
            changed = ", with uncommitted changes" if code.get("uncommitted_changes") else ""
            facts["code"] = f"relaxd {code.get('relaxd')}{commit}{changed}, Python {code.get('python')}"
        if started := self.summary.get("started"):
            facts["started"] = str(started)
        return facts


def place_of(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Return the index of an evaluation answer's prompt, and the answer's number among that prompt's answers."""
    return answer["index"], answer.get("sample", 0)


def results(summary: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return name, value before training and value after it, for the held-out reward and each part of it."""
    found = []
    for key, before in summary.items():
        name = key.removesuffix("_before")
        after = summary.get(f"{name}_after")
        if name != key and before is not None and after is not None:
            found.append((name, float(before), float(after)))
    return found


OF_CONVERSATIONS = ("conversation", "turns", "environment_reward", "environment_seconds")
"""Fields of samples that only runs with an environment have."""


def sample_values(sample: pb.TrainedSample) -> dict[str, Any]:
    """Return a sample's fields by name, without its tokens. 64-bit numbers stay numbers, unlike in protobuf's JSON."""
    values = {field.name: getattr(sample, field.name) for field in sample.DESCRIPTOR.fields}
    values["conversation"] = [
        {"role": message.role, "content": message.content, "tool_calls": list(message.tool_calls)}
        for message in sample.conversation
    ]
    values["reward_parts"] = dict(sample.reward_parts)
    for repeated in ("media", "receipts"):
        values[repeated] = [
            {field.name: getattr(item, field.name) for field in item.DESCRIPTOR.fields} for item in values[repeated]
        ]
    left_out = {"tokens", *(() if sample.turns else OF_CONVERSATIONS)}
    left_out |= {repeated for repeated in ("media", "receipts") if not values[repeated]}
    return {name: value for name, value in values.items() if name not in left_out}


def read_result(folder: Path) -> RunResult:
    """Read the folder of a finished or running run. Raises CliError for missing or invalid files."""
    try:
        ended = (folder / SUMMARY).exists() or not (folder / "run.json").exists()
        summary = json.loads((folder / (SUMMARY if ended else "run.json")).read_text())
        lines = list(with_original(folder, read_lines(folder / "metrics.jsonl", growing=not ended)))
        samples = list(islice(newest_samples(folder), SHOWN_SAMPLES))
        config = folder / "config.toml"
        config_toml = config.read_text() if config.exists() else ""
        code = folder / CODE
        code_version = json.loads(code.read_text()) if code.exists() else {}
    except (OSError, ValueError) as error:
        raise CliError(f"{folder} is not the folder of a run: {error}") from error
    if not ended:  # run.json is the coordinator's record
        summary = {"run_id": summary.get("run_id"), "state": str(summary.get("phase", "")).lower()} | {
            "steps": max((line.get("step", 0) for line in lines), default=0),
            "started": summary.get("create_time"),
        }
    return RunResult(
        folder=folder,
        summary=summary,
        lines=lines,
        config_toml=config_toml,
        config=_read_config(folder),
        code=code_version,
        samples=samples,
    )


def _read_config(folder: Path) -> RunConfig | None:
    try:
        return RunConfig.model_validate_json((folder / "config.json").read_bytes())
    except (OSError, ValidationError):
        return None


def read_lines(path: Path, *, growing: bool = False) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file. If `growing`, an incomplete last line is left out. Raises OSError or
    ValueError."""
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1] if growing else text
    return [json.loads(line) for line in lines.splitlines() if line.strip()]
