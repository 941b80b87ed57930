"""The curriculum of a run: the record of its prompts, its visits, its history in the run's folder, and a summary in
words.

Exactly one line in groups.jsonl counts for each closed group (`closed_groups`), even if a coordinator died while
writing (docs/ledger.md). So the record can be rebuilt from the file and counts no group twice. The snapshot only saves
reading the file from its beginning: the snapshot's first line is JSON, the rest are the arrays.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.config import RunConfig
from relaxd.data.curriculum.own_filter import FilterError, GroupFilter
from relaxd.data.curriculum.own_sampler import OwnSampler, make_sampler
from relaxd.data.curriculum.prompt_record import BUCKETS, PromptRecord, Visit
from relaxd.data.dataset import Cursor, Prompt, PromptDataset
from relaxd.models import DataError
from relaxd.run_folder import CURRICULUM, GROUPS, closed_groups, replace_file

FIRST_LOOK = 64
"""Number of positions that the first search for the next visit covers; each further search covers four times as
many."""
OWN_CHOICES = 1000
"""Maximum number of times in a row that a user's sampler may choose a prompt that is left out. Then the last choice is
visited in any case."""


@dataclass(frozen=True)
class Visited:
    """A visit to a prompt: its position, the prompt and the reason."""

    cursor: Cursor
    """Position of the visit. The next search starts after it (`PromptDataset.after`)."""
    prompt: Prompt
    """Prompt that is visited."""
    why: Visit
    """Reason of the visit to the prompt: its turn, a replay or a re-test."""


@dataclass(frozen=True)
class _Epoch:
    """An epoch of the curriculum: the prompt of each place, and random numbers from 0 to 1 for each place."""

    number: int
    order: np.ndarray
    """Index of the prompt of each place, int32 [places]."""
    skip: np.ndarray
    """Random number of each place, float32 [places]. The visit takes place if the number is below its prompt's
    chance."""
    replay: np.ndarray
    """Random number of each place, float32 [places]. If it is below curriculum.replay, a hard prompt is visited; the
    number also chooses which."""


class Visits:
    """Finds the next visit of the curriculum from any cursor.

    Each place of an epoch has a prompt, which is visited with the prompt's chance (`PromptRecord.chances`). With
    probability curriculum.replay the visit goes to a hard prompt instead. The random numbers depend only on seed and
    place, so a restarted coordinator with the same record continues the same sequence.

    Each place is examined once; a skipped place costs about 20 ns.
    """

    def __init__(self, prompts: PromptDataset, record: PromptRecord, seed: int) -> None:
        self._prompts = prompts
        self._record = record
        self._config = record.config
        self._seed = seed
        self._epoch: _Epoch | None = None
        self._told = 0
        """Number of repeated prompts that are already marked in the record."""
        self._own = OwnSampler(self._config, len(record), seed) if self._config.is_own else None

    def next(self, cursor: Cursor) -> Visited:
        """Return the first visit at or after a cursor.

        Raises DataError if a prompt is too long and may not be left out, if all prompts are too long or repeats, if a
        row is wrong, or if a user's own sampler fails.
        """
        if self._config.chooses:
            self._is_repeat(cursor)  # so that the record knows the same as that of another coordinator
        for _ in range(len(self._prompts)):
            cursor, index, why = self._choose(cursor)
            if why == "replay" or not self._is_repeat(cursor):
                prompt = self._prompts.prompt(index)
                if self._prompts.fits(prompt):
                    return Visited(cursor, prompt, why)
            cursor = self._prompts.after(cursor)
        raise self._prompts.none_left()

    def _is_repeat(self, cursor: Cursor) -> bool:
        """Return True if the prompt at a position is a repeat, and mark all known repeats in the record."""
        found = self._prompts.is_repeat(cursor)
        repeats = self._prompts.repeats
        if len(repeats) > self._told:
            self._record.leave_out(repeats[self._told :])
            self._told = len(repeats)
        return found

    def _choose(self, cursor: Cursor) -> tuple[Cursor, int, Visit]:
        """Return the position of the first visit at or after `cursor`, the index of its prompt, and its reason."""
        if cursor.again or not self._config.chooses:  # one that was open when the run was interrupted is given again
            return cursor, self._prompts.index_at(cursor), ""
        with self._record.lock:
            return self._ask_own(cursor) if self._own is not None else self._look(cursor)

    def _look(self, cursor: Cursor) -> tuple[Cursor, int, Visit]:
        looked_at = 0
        while True:
            epoch = self._of_epoch(cursor.epoch)
            done = cursor.done[0] if cursor.done else None  # the next place that was visited already
            stop = done[1] if done is not None and done[0] == cursor.epoch else len(epoch.order)
            # After a whole epoch without a visit, the next prompt that isn't left out will do.
            found = self._first(epoch, cursor.position, stop, always=looked_at >= len(epoch.order))
            if found is not None:
                place = Cursor(cursor.epoch, found, done=cursor.done)
                return place, *self._visit(epoch, found)
            looked_at += stop - cursor.position
            cursor = self._prompts.after(Cursor(cursor.epoch, stop - 1, done=cursor.done))

    def _first(self, epoch: _Epoch, start: int, stop: int, *, always: bool) -> int | None:
        """Return the first position from `start` to `stop` - 1 whose visit takes place; None if there is none."""
        size = FIRST_LOOK
        replays = self._config.replay if self._record.hard_prompt(0.0) is not None else 0.0
        while start < stop:
            part = slice(start, min(stop, start + size))
            draws = 0.0 if always else epoch.skip[part]
            found = np.flatnonzero((draws < self._record.chances(epoch.order[part])) | (epoch.replay[part] < replays))
            if found.size:
                return start + int(found[0])
            start, size = start + size, 4 * size
        return None

    def _visit(self, epoch: _Epoch, position: int) -> tuple[int, Visit]:
        draw = float(epoch.replay[position])
        if draw < self._config.replay and (hard := self._record.hard_prompt(draw / self._config.replay)) is not None:
            return hard, "replay"
        index = int(epoch.order[position])
        return index, "retest" if self._record.is_retest(index) else ""

    def _ask_own(self, cursor: Cursor) -> tuple[Cursor, int, Visit]:
        """Call the user's own sampler until it chooses a prompt that isn't left out. Returns position, prompt index and
        reason."""
        assert self._own is not None
        for _ in range(OWN_CHOICES):
            index = self._own.choose(cursor.epoch * len(self._prompts) + cursor.position, self._record)
            skip = self._of_epoch(cursor.epoch).skip[cursor.position]
            if skip < self._record.chances(np.array([index]))[0]:
                break
            cursor = self._prompts.after(cursor)
        return cursor, index, "retest" if self._record.is_retest(index) else ""

    def _of_epoch(self, number: int) -> _Epoch:
        if self._epoch is None or self._epoch.number != number:
            order = self._prompts.order(number)
            rng = np.random.default_rng((self._seed, number, 1))  # the order is of (seed, number)
            draws = rng.random((2, len(order)), dtype=np.float32)
            self._epoch = _Epoch(number, order, draws[0], draws[1])
        return self._epoch


logger = logging.getLogger(__name__)

SNAPSHOT_GROUPS = 50_000
"""Number of closed groups between two snapshots of the record; as many are read from groups.jsonl within a second."""


def load(record: PromptRecord, folder: Path) -> str:
    """Fill an empty record from the files in a run's folder. Returns the entry of the last group that was read from
    groups.jsonl, or "" if there is none."""
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
    """Write a snapshot of a record. `end` is the number of bytes of groups.jsonl that the record includes, `last` the
    entry of the last included group."""
    with record.lock:
        head = {"prompts": len(record), "end": end, "last": last, "visits": record.visits}
        tries, pass_rate = record.tries.tobytes(), record.pass_rate.tobytes()
    replace_file(folder / CURRICULUM, json.dumps(head).encode() + b"\n" + tries + pass_rate)


def _read_snapshot(record: PromptRecord, path: Path, size: int) -> tuple[int, str]:
    """Restore a record from a snapshot file, if the snapshot has as many prompts and includes at most `size` bytes of
    groups.jsonl.

    Returns the number of included bytes and the entry of the last included group; 0 and "" without such a snapshot.
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
    """Updates the record of prompts with every closed group, and chooses the next prompts."""

    def __init__(self, config: RunConfig, prompts: PromptDataset) -> None:
        self._config = config.data.curriculum
        self._needed = min(config.trainer.groups_per_step, prompts.prompts)
        self.record = PromptRecord(prompts.prompts, self._config, needed=self._needed)
        self.visits = Visits(prompts, self.record, config.run.seed)
        self._unsaved = 0
        self._exhausted = False

    def load(self, folder: Path) -> str:
        """Load the groups that were closed before the coordinator started.

        Returns the entry of the last such group in groups.jsonl, or "" if there is none.
        """
        last = load(self.record, folder)
        self._tell()
        return last

    def observe(self, folder: Path, lines: Sequence[Mapping[str, Any]], end: int) -> None:
        """Count new lines of groups.jsonl into the record, and save a snapshot from time to time. The last line ends at
        byte `end`."""
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
        """Reason why the run ends now: too few prompts remain, and curriculum.exhausted is "end"; "" if it goes on."""
        return f"the curriculum is exhausted: {self._left}" if self._ends and self.record.exhausted else ""

    def metrics(self) -> dict[str, float]:
        """Return the curriculum's metrics. If the curriculum doesn't choose prompts, return only the number of repeated
        prompts."""
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
        """Return a summary of the curriculum as lines of text; [] if the curriculum doesn't choose prompts."""
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
    """Return the problems with a user's sampler and filter, each with the name of its setting."""
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
    """Return a summary of a record of prompts, as lines of text for users."""
    counts = [(bucket / BUCKETS, count) for bucket, count in enumerate(record.histogram) if count]
    rates = ", ".join(f"{count} at {rate:g} to {rate + 1 / BUCKETS:g}" for rate, count in counts)
    left_out = f"{record.solved} solved and {record.too_hard} too hard ones are left out"
    visits = f"{record.visits['replay']} replays and {record.visits['retest']} re-tests were scored"
    return [
        f"curriculum: {record.tried} of {len(record)} prompts tried; {left_out}; {visits}",
        f"prompts by pass rate: {rates or 'none yet'}",
    ]
