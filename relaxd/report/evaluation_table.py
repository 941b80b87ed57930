"""The results of evaluations as a table: a row for each step and set."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relaxd.evaluation.scored_answers import is_end, is_estimate, shown_name
from relaxd.run_folder import HELD_OUT

COUNTS = ("prompts", "unscored", "response_length", "truncated_share", "step")
"""Metrics of a set that are neither the reward nor a part of it."""


@dataclass(frozen=True)
class SetRow:
    """The results of one evaluation on one set."""

    step: int
    """The evaluated version."""
    name: str
    """The set's name."""
    values: Mapping[str, float]
    """Metrics without the set's prefix, as `summarise_set` names them."""

    @property
    def estimates(self) -> list[str]:
        """Names of pass@k and maj@k, in order of k."""
        names = [name for name in self.values if is_estimate(name) and not is_end(name)]
        return sorted(names, key=lambda name: (name.startswith("maj"), int(name.rpartition("_")[2])))

    @property
    def parts(self) -> list[str]:
        """Names of the parts of the reward."""
        return [name for name in self.values if name not in (*COUNTS, "reward") and not is_estimate(name)]

    def estimate(self, name: str) -> str:
        """Return a value with its 95 % confidence interval: "0.42 [0.33, 0.52]"."""
        if (value := self.values.get(name)) is None:
            return ""
        low, high = self.values.get(f"{name}_low"), self.values.get(f"{name}_high")
        return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")


def set_rows(lines: Iterable[Mapping[str, Any]]) -> list[SetRow]:
    """Return the results in lines of metrics.jsonl: set by set, step by step, the held-out prompts first."""
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
    """Return titles and cells of the table, with those columns that any row fills."""
    rows = list(rows)
    estimates = sorted(
        {name for row in rows for name in row.estimates},
        key=lambda name: (name.startswith("maj"), int(name.rpartition("_")[2])),
    )
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
