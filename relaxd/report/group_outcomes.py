"""The outcomes of a run's groups, from groups.jsonl: filters, and a comparison of trained with published groups."""

import difflib
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from relaxd.run_folder import GROUPS, closed_groups, newest_lines
from relaxd.v1 import coordinator_pb2 as pb

FIELDS = (
    *("group", "index", "source", "prompt_tokens", "fate", "step", "reason", "stage", "attempt", "retry", "retried"),
    *("tokens", "truncated", "continued", "reward", "samples", "right", "equal_rewards", "visit"),
)
"""Fields of a group's outcome that a filter condition may name."""
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|=|<|>)\s*(.+?)\s*")
Test = Callable[[dict[str, Any]], bool]


PAGE = 4096
"""Maximum number of groups that a summary has in memory at once."""
CHUNK = 1 << 15
"""Number of positions in an epoch that a GroupSet stores in one array of bits."""
GROUP_ID = re.compile(r"(\d+)-(\d{1,18})(?:~(\d+))?", re.ASCII)
"""Pattern of a group's id: epoch, position in the epoch, and number of the retry."""


class GroupSet:
    """A set of groups' ids, one bit each: groups of ten million prompts take about 1.3 MB."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, int, int], bytearray] = {}
        self._others: set[str] = set()

    def add(self, group: str) -> bool:
        """Add a group's id. Returns True if the set lacked it."""
        match = GROUP_ID.fullmatch(group)
        if match is None:
            known = group in self._others
            self._others.add(group)
            return not known
        epoch, place, retry = (int(part or 0) for part in match.groups())
        bits = self._chunks.setdefault((epoch, retry, place // CHUNK), bytearray())
        number, bit = divmod(place % CHUNK, 8)
        if number >= len(bits):
            bits.extend(bytes(number + 1 - len(bits)))
        known = bool(bits[number] & 1 << bit)
        bits[number] |= 1 << bit
        return not known


class ConditionError(ValueError):
    """A filter condition for groups can't be parsed, or names an unknown field."""


def read_fates(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each closed group, newest first: its line of groups.jsonl, with `fate` and `retry` added.

    If the run was restored, a group may have several lines, of which the newest counts.
    """
    seen = GroupSet()
    for line in newest_lines(folder / GROUPS):
        if seen.add(line["group"]):
            yield _with_fate(line)


def _with_fate(line: dict[str, Any]) -> dict[str, Any]:
    line["fate"] = "trained" if "step" in line else "dropped"
    line["retry"] = int(line["group"].partition("~")[2] or 0)
    return line


def outcome_message(line: Mapping[str, Any]) -> pb.ClosedGroup:
    """Convert a group's outcome, as `read_fates` yields it, to a protobuf message."""
    message = pb.ClosedGroup(
        group_id=line["group"],
        reason=line.get("reason", ""),
        stage=line.get("stage", ""),
        retry=line["retry"],
        retried=bool(line.get("retried")),
        source=str(line.get("source", "")),
        trace_id=line.get("trace_id", ""),
    )
    for of_message, name in (("step", "step"), ("row", "index"), ("tokens", "tokens"), ("reward", "reward")):
        if line.get(name) is not None:
            setattr(message, of_message, line[name])
    return message


def of_prompt(prompt: str) -> Test:
    """Return a test that selects the groups of one prompt, which its row in the data or a group's id names.

    An id such as "0-000012" selects a single visit of the prompt, with its retries.
    """
    if prompt.isdigit():
        return lambda line: line.get("index") == int(prompt)
    visit = prompt.partition("~")[0]
    return lambda line: line["group"].partition("~")[0] == visit


def condition(text: str) -> Test:
    """Return a test that selects groups by conditions such as "reason = stale and tokens > 1000".

    A group that lacks a condition's field passes only `!=`. Raises ConditionError.
    """
    tests = [_one_condition(part) for part in re.split(r"\s+and\s+", text.strip())]
    return lambda line: all(test(line) for test in tests)


def _one_condition(text: str) -> Test:
    match = CONDITION.fullmatch(text)
    if match is None:
        raise ConditionError(f'{text!r} is no condition: write FIELD = VALUE, such as "reason = stale"')
    name, sign, given = match.groups()
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=1)
        raise ConditionError(
            f"{name!r} is unknown: {f'did you mean {near[0]}?' if near else 'there are ' + ', '.join(FIELDS)}"
        )
    value = _value(given.strip("\"'"))
    compare = OPERATORS[sign]

    def test(line: dict[str, Any]) -> bool:
        found = line.get(name)
        if found is None or isinstance(found, str) != isinstance(value, str):
            return sign == "!="
        return compare(found, value)

    return test


def _value(text: str) -> str | float:
    if text in ("true", "false"):
        return float(text == "true")
    try:
        return float(text)
    except ValueError:
        return text


@dataclass
class GroupTally:
    """Numbers of closed, trained and dropped groups that have a property in common."""

    closed: int = 0
    trained: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Numbers of dropped groups, by reason."""

    def add(self, line: dict[str, Any], times: int = 1) -> None:
        """Add a group to the counts; with `times` = -1, subtract it."""
        self.closed += times
        if line["fate"] == "trained":
            self.trained += times
        else:
            self.reasons[line["reason"]] += times


@dataclass
class Mean:
    """Running mean of the values that were added."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value to the mean; with `times` = -1, remove it."""
        self.total += times * value
        self.count += times

    @property
    def value(self) -> float:
        """Mean of the added values; NaN without values."""
        return self.total / self.count if self.count else math.nan


@dataclass
class Summary:
    """Summary of a run's closed groups, which compares trained groups with all. Its size grows with the number of data
    sources, not of groups."""

    all: GroupTally = field(default_factory=GroupTally)
    retried: int = 0
    """Number of groups that were retries of earlier groups."""
    continued: int = 0
    """Number of groups in which an answer was cut off and continued."""
    by: dict[str, dict[str, GroupTally]] = field(default_factory=lambda: {name: {} for name in DIMENSIONS})
    """Counts of groups by dimension (DIMENSIONS), then by the group's label in this dimension."""
    means: dict[str, tuple[Mean, Mean]] = field(
        default_factory=lambda: {name: (Mean(), Mean()) for name in ("prompt_tokens", "tokens", "truncated", "reward")}
    )
    """Means of groups' fields, by the field's name: the mean over all groups that have it, and over the trained
    ones."""

    def add(self, line: dict[str, Any], times: int = 1) -> None:
        """Add a group, as `read_fates` yields it, to the summary; with `times` = -1, subtract it."""
        self.all.add(line, times)
        self.retried += times * (line["retry"] > 0)
        self.continued += times * (line.get("continued", 0) > 0)
        for name, label_of in DIMENSIONS.items():
            self.by[name].setdefault(label_of(line), GroupTally()).add(line, times)
        for name, (of_all, of_trained) in self.means.items():
            if (value := line.get(name)) is not None:
                of_all.add(value, times)
                if line["fate"] == "trained":
                    of_trained.add(value, times)


def summarise_fates(folder: Path, see: Callable[[list[dict[str, Any]]], object] = lambda lines: None) -> Summary:
    """Summarise the closed groups of a run, in one pass over groups.jsonl.

    If the run was restored, a group may have several lines, of which the newest counts. Only then the file is read
    again, to subtract the older lines.

    Args:
        folder: the run's folder.
        see: called with all lines, oldest first, PAGE at a time.
    """
    summary, seen, again = Summary(), GroupSet(), Counter[str]()
    lines = closed_groups(folder)
    while page := list(islice(lines, PAGE)):
        for line in page:
            summary.add(_with_fate(line))
            if not seen.add(line["group"]):
                again[line["group"]] += 1
        see(page)
    older = (line for line in closed_groups(folder) if again[line["group"]] > 0) if again else ()
    for line in older:
        again[line["group"]] -= 1
        summary.add(_with_fate(line), -1)
    for name, buckets in summary.by.items():
        labels = sorted((label for label, bucket in buckets.items() if bucket.closed), key=_order)
        summary.by[name] = {label: buckets[label] for label in labels}
    return summary


def _length(line: dict[str, Any]) -> str:
    tokens = line.get("tokens")
    if tokens is None:
        return "no answers yet"
    if tokens < 1:
        return "0 tokens"
    low = 2 ** int(math.log2(tokens))
    return f"{low}-{2 * low - 1} tokens"


def _difficulty(line: dict[str, Any]) -> str:
    reward = line.get("reward")
    if reward is None:
        return "not scored"
    if reward <= 0:
        return "mean reward 0 or less"
    if reward >= 1:
        return "mean reward 1 or more"
    quarter = min(3, int(reward * 4))
    return f"mean reward {quarter / 4:g} to {(quarter + 1) / 4:g}"


def _order(label: str) -> tuple[int, float, str]:
    """Return a sort key that orders labels by the number in them. Labels without a number come last."""
    found = re.search(r"[\d.]+", label)
    if found is None:
        return (1, 0.0, label)
    return (0, float(found[0]) + 0.1 * ("to" in label), label)


DIMENSIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "length of the answers": _length,
    "source": lambda line: str(line.get("source", "no data_source")),
    "difficulty": _difficulty,
}
"""Properties by which the summary counts groups, each with the function that returns a group's label."""
