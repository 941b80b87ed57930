"""The curriculum of a run: its record, its visits, its history in the run's folder, and a summary for people.

Exactly one line in groups.jsonl counts for each closed group (`closed_groups`), even if a coordinator died while
writing (docs/ledger.md). So the record can be rebuilt from the file and counts no group twice. The snapshot only saves
reading the file from its beginning: its first line is JSON, the rest are the arrays.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.config import RunConfig
from relaxd.data.curriculum.own_filter import FilterError, GroupFilter
from relaxd.data.curriculum.own_sampler import make_sampler
from relaxd.data.curriculum.prompt_record import BUCKETS, PromptRecord
from relaxd.data.curriculum.visits import Visits
from relaxd.data.dataset import PromptDataset
from relaxd.models import DataError
from relaxd.run_folder import CURRICULUM, GROUPS, closed_groups, replace_file

logger = logging.getLogger(__name__)

SNAPSHOT_GROUPS = 50_000
"""Closed groups between two snapshots; that many are read within a second."""


def load(record: PromptRecord, folder: Path) -> str:
    """Fill an empty record from a run's folder. Returns the last entry of groups.jsonl that was read, "" without
    one."""
    groups = folder / GROUPS
    size = groups.stat().st_size if groups.is_file() else 0
    start, last = _read_snapshot(record, folder / CURRICULUM, size)

    def lines() -> Iterator[dict[str, Any]]:
        nonlocal last
        for line in closed_groups(folder, start, last):
            last = str(line.get("entry", last))
            yield line

    if unknown := record.observe(lines()):
        logger.warning("%s has %d groups of prompts that the data doesn't have: has it changed?", groups, unknown)
    return last


def save(record: PromptRecord, folder: Path, end: int, last: str) -> None:
    """Write a snapshot of a record that includes groups.jsonl up to byte `end`, and the entry `last`."""
    with record.lock:
        head = {"prompts": len(record), "end": end, "last": last, "visits": record.visits}
        tries, pass_rate = record.tries.tobytes(), record.pass_rate.tobytes()
    replace_file(folder / CURRICULUM, json.dumps(head).encode() + b"\n" + tries + pass_rate)


def _read_snapshot(record: PromptRecord, path: Path, size: int) -> tuple[int, str]:
    """Restore a record from a snapshot, if it has as many prompts and includes at most `size` bytes of groups.jsonl.

    Returns the included bytes and the last included entry; 0 and "" without such a snapshot.
    """
    try:
        first, _, arrays = path.read_bytes().partition(b"\n")
        head: dict[str, Any] = json.loads(first)
        prompts = int(head["prompts"])
        end, last = int(head["end"]), str(head["last"])
        if prompts != len(record) or end > size:
            raise ValueError(f"it is of {prompts} prompts and {end} bytes, not of {len(record)} and {size}")
        tries = np.frombuffer(arrays, np.uint16, prompts)
        record.restore(tries, np.frombuffer(arrays, np.float32, prompts, tries.nbytes), head["visits"])
        return end, last
    except FileNotFoundError:
        return 0, ""
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s doesn't fit, so pass rates are counted again from %s: %s", path, GROUPS, error)
        return 0, ""


class Curriculum:
    """Updates the record with every closed group, and chooses the next prompts."""

    def __init__(self, config: RunConfig, prompts: PromptDataset) -> None:
        self._config = config.data.curriculum
        self._needed = min(config.trainer.groups_per_step, prompts.prompts)
        self.record = PromptRecord(prompts.prompts, self._config, needed=self._needed)
        self.visits = Visits(prompts, self.record, config.run.seed)
        self._unsaved = 0
        self._exhausted = False

    def load(self, folder: Path) -> str:
        """Load the groups that were closed before the coordinator started.

        Returns the entry of the last one in groups.jsonl, "" if there is none.
        """
        last = load(self.record, folder)
        self._tell()
        return last

    def observe(self, folder: Path, lines: Sequence[Mapping[str, Any]], end: int) -> None:
        """Process new lines of groups.jsonl in the run's folder; the last one ends at byte `end`."""
        self.record.observe(lines)
        self._unsaved += len(lines)
        if self._unsaved >= SNAPSHOT_GROUPS:
            try:
                save(self.record, folder, end, str(lines[-1]["entry"]))
                self._unsaved = 0
            except OSError as error:  # it only saves time at the next start
                logger.warning("%s can't be written, and is tried again: %s", folder / CURRICULUM, error)
        self._tell()

    @property
    def ended(self) -> str:
        """Reason for the run to end, if too few prompts remain and curriculum.exhausted is "end"; else empty."""
        return f"the curriculum is exhausted: {self._left}" if self._ends and self.record.exhausted else ""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a run whose curriculum chooses; for other runs only repeats."""
        record = self.record
        repeated: dict[str, float] = {"prompts_repeated": record.repeated} if record.repeated else {}
        if not self._config.chooses:
            return repeated
        rates = {f"prompts_pass_rate_{bucket}": count for bucket, count in enumerate(record.histogram)}
        return {
            "prompts_tried": record.tried,
            "prompts_solved": record.solved,
            "prompts_too_hard": record.too_hard,
            "replayed_groups": record.visits["replay"],
            "retested_groups": record.visits["retest"],
            **rates,
            **repeated,
        }

    def describe(self) -> list[str]:
        """Return lines for people; none if the curriculum doesn't choose."""
        if not self._config.chooses:
            return []
        lines = summary(self.record)
        if self.record.exhausted:
            what = "the run ends" if self._ends else "all prompts are given again, until enough have such a pass rate"
            lines.append(f"the curriculum is exhausted: {self._left}; {what}")
        return lines

    @property
    def _ends(self) -> bool:
        return self._config.exhausted == "end"

    @property
    def _left(self) -> str:
        record = self.record
        prompts = len(record) - record.repeated
        return (
            f"{prompts - record.solved - record.too_hard} of {prompts} prompts have a pass rate from "
            f"{self._config.min_pass_rate} to {self._config.max_pass_rate} or are yet to be tried, fewer "
            f"than a step's {self._needed} groups ({record.solved} are solved, {record.too_hard} too hard)"
        )

    def _tell(self) -> None:
        """Log when the curriculum becomes exhausted, and when it recovers."""
        if self.record.exhausted != self._exhausted:
            self._exhausted = self.record.exhausted
            logger.warning("%s", self.describe()[-1] if self._exhausted else "the curriculum is no longer exhausted")


def own_problems(config: RunConfig, prompts: PromptDataset) -> list[tuple[str, str]]:
    """Return (setting, problem) for each fault of a user's sampler and filter."""
    problems, own = [], config.data.curriculum
    if own.is_own:
        try:
            make_sampler(own, prompts.prompts, config.run.seed)
        except DataError as error:
            problems.append((error.field, error.message))
    if own.filter:
        try:
            GroupFilter(own.filter)
        except FilterError as error:
            problems.append(("data.curriculum.filter", str(error)))
    return problems


def summary(record: PromptRecord) -> list[str]:
    """Summarize a record, in lines for people."""
    counts = [(bucket / BUCKETS, count) for bucket, count in enumerate(record.histogram) if count]
    rates = ", ".join(f"{count} at {rate:g} to {rate + 1 / BUCKETS:g}" for rate, count in counts)
    left_out = f"{record.solved} solved and {record.too_hard} too hard ones are left out"
    visits = f"{record.visits['replay']} replays and {record.visits['retest']} re-tests were scored"
    return [
        f"curriculum: {record.tried} of {len(record)} prompts tried; {left_out}; {visits}",
        f"prompts by pass rate: {rates or 'none yet'}",
    ]
