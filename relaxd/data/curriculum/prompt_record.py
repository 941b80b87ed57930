"""The record of every prompt's difficulty: its pass rate, whether it is left out as solved or too hard, and the pool of
hard prompts to replay.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from relaxd.config.data import CurriculumConfig


class Pool:
    """A set of integers from 0 to `most` - 1, from which a random member can be drawn. It takes 8 bytes per possible
    integer."""

    def __init__(self, most: int) -> None:
        self._members = np.zeros(most, np.int32)
        """Members of the set at the first `_size` places, in any order; the other places are unused."""
        self._place = np.full(most, -1, np.int32)
        """Index of each member in `_members`; -1 for numbers that aren't members."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def at(self, draw: float) -> int:
        """Return the member that a random number selects, 0 <= draw < 1. Raises IndexError if the pool is empty."""
        if not self._size:
            raise IndexError("the pool is empty")
        return int(self._members[min(int(draw * self._size), self._size - 1)])

    def put(self, number: int, inside: bool) -> None:
        """Add a number to the pool if `inside`, else remove it."""
        place = int(self._place[number])
        if inside and place < 0:
            self._members[self._size], self._place[number] = number, self._size
            self._size += 1
        elif not inside and place >= 0:
            self._size -= 1
            last = self._members[self._size]
            self._members[place], self._place[last] = last, place
            self._place[number] = -1

    def fill(self, numbers: np.ndarray) -> None:
        """Replace all members of the pool by these numbers."""
        self._size = len(numbers)
        self._members[: self._size] = numbers
        self._place[:] = -1
        self._place[numbers] = np.arange(self._size)


Visit = Literal["", "replay", "retest"]
"""Reason of a visit to a prompt. "": the prompt's turn has come. replay: it is hard. retest: it is left out, but
visited to see whether it still should be."""
BUCKETS = 10
"""Number of pass-rate buckets of the histogram: 0 to 0.1, 0.1 to 0.2, ..."""
OPEN, SOLVED, TOO_HARD, REPEATED = 0, 1, 2, 3
MAX_TRIES = 65_535


class PromptRecord:
    """Number of tries and pass rate of every prompt, 11 bytes each (19 with replay). Safe to use from several threads.

    After each scored group the pass rate p of its prompt becomes p + (r - p) / min(tries, memory), where r is the
    group's mean reward, scaled from [min_reward, max_reward] to [0, 1]. So p is a mean at first, later an exponential
    moving average.
    """

    def __init__(self, prompts: int, config: CurriculumConfig, *, needed: int = 1) -> None:
        """Create a record of untried prompts. It is exhausted (see `exhausted`) if fewer than `needed` prompts
        remain."""
        self.config = config
        self.lock = threading.Lock()
        """Lock that is held while the record changes."""
        self.tries = np.zeros(prompts, np.uint16)
        """Number of scored groups of each prompt, uint16 [prompts]."""
        self.pass_rate = np.zeros(prompts, np.float32)
        """Pass rate of each prompt, float32 [prompts]; 0 where `tries` is 0."""
        self.visits: dict[Visit, int] = {"": 0, "replay": 0, "retest": 0}
        """Number of scored groups, by the reason of the visit that the group came from."""
        self._needed = min(needed, prompts)
        self._state = np.zeros(prompts, np.uint8)
        self._chance = np.ones(prompts, np.float32)
        self._counts = [prompts, 0, 0, 0]
        self._histogram = np.zeros(BUCKETS, np.int64)
        self._hard = Pool(prompts) if config.replay > 0 else None

    def __len__(self) -> int:
        return len(self.tries)

    @property
    def left_out(self) -> np.ndarray:
        """Mask of the prompts that are left out, because they are solved, too hard or repeats of others, bool
        [prompts]."""
        return self._state != OPEN

    @property
    def solved(self) -> int:
        """Number of prompts that are left out as solved."""
        return self._counts[SOLVED]

    @property
    def too_hard(self) -> int:
        """Number of prompts that are left out as too hard."""
        return self._counts[TOO_HARD]

    @property
    def repeated(self) -> int:
        """Number of prompts that are left out as repeats of others."""
        return self._counts[REPEATED]

    @property
    def tried(self) -> int:
        """Number of prompts with at least one scored group."""
        return int(self._histogram.sum())

    @property
    def histogram(self) -> list[int]:
        """Number of tried prompts with a pass rate of 0 to 0.1, 0.1 to 0.2, ..., 0.9 to 1."""
        return [int(count) for count in self._histogram]

    @property
    def exhausted(self) -> bool:
        """True if fewer prompts remain than the run needs. Then no prompt is left out until enough remain again."""
        return self._counts[OPEN] < self._needed

    def observe(self, lines: Iterable[Mapping[str, Any]]) -> int:
        """Count the rewards of groups into tries and pass rates of their prompts. `lines` are lines of groups.jsonl,
        oldest first. Returns the number of groups whose prompt is unknown.

        Every scored group counts, whether it was trained on or dropped.
        """
        unknown = 0
        with self.lock:
            for line in lines:
                index, reward = line.get("index"), line.get("reward")
                if index is None or reward is None:
                    continue
                if not 0 <= index < len(self):
                    unknown += 1
                    continue
                self._observe(index, reward)
                why: Visit = line.get("visit", "")
                self.visits[why] = self.visits.get(why, 0) + 1
        return unknown

    def chances(self, indices: np.ndarray) -> np.ndarray:
        """Return the probability that a visit to each of these prompts takes place, float32 [indices]."""
        return np.ones(len(indices), np.float32) if self.exhausted else self._chance[indices]

    def is_retest(self, index: int) -> bool:
        """Return True if a visit to this prompt is a re-test, which is a visit to a left-out prompt."""
        return bool(self._state[index] != OPEN) and not self.exhausted

    def hard_prompt(self, draw: float) -> int | None:
        """Return the index of the hard prompt that a random number selects, 0 <= draw < 1; None if no prompt is
        hard."""
        return self._hard.at(draw) if self._hard is not None and len(self._hard) else None

    def leave_out(self, repeats: Sequence[int]) -> None:
        """Leave out prompts of the record permanently, because they repeat other prompts."""
        with self.lock:
            for index in repeats:
                self._counts[self._state[index]] -= 1
                self._counts[REPEATED] += 1
                self._state[index], self._chance[index] = REPEATED, 0

    def restore(self, tries: np.ndarray, pass_rate: np.ndarray, visits: Mapping[Visit, int]) -> None:
        """Replace the record's contents by those of another record of the same prompts. The curriculum's settings may
        differ."""
        with self.lock:
            self.tries[:], self.pass_rate[:], self.visits = tries, pass_rate, dict(visits)
            self._state[:] = np.where(self._state == REPEATED, REPEATED, self._states(self.tries, self.pass_rate))
            self._chance[:] = self._chances(self.tries, self.pass_rate, self._state)
            self._counts = np.bincount(self._state, minlength=4).tolist()
            self._histogram = np.bincount(_buckets(self.pass_rate[self.tries > 0]), minlength=BUCKETS)
            if self._hard is not None:
                self._hard.fill(np.flatnonzero(self._are_hard(self.tries, self.pass_rate, self._state)))

    def _observe(self, index: int, reward: float) -> None:
        config, tries, rate = self.config, int(self.tries[index]), float(self.pass_rate[index])
        passed = min(1.0, max(0.0, (reward - config.min_reward) / (config.max_reward - config.min_reward)))
        if tries:
            self._histogram[_buckets(self.pass_rate[index])] -= 1
        tries = min(tries + 1, MAX_TRIES)
        self.tries[index] = tries
        self.pass_rate[index] = rate + (passed - rate) / min(tries, config.memory)
        one = slice(index, index + 1)
        now = (self.tries[one], self.pass_rate[one])
        state = self._states(*now)
        self._counts[self._state[index]] -= 1
        self._counts[int(state[0])] += 1
        self._state[one] = state
        self._chance[one] = self._chances(*now, state)
        self._histogram[_buckets(self.pass_rate[index])] += 1
        if self._hard is not None:
            self._hard.put(index, bool(self._are_hard(*now, state)[0]))

    def _states(self, tries: np.ndarray, pass_rate: np.ndarray) -> np.ndarray:
        """Return for each prompt whether it is OPEN, SOLVED or TOO_HARD, uint8 [prompts]."""
        known = tries >= self.config.tries
        solved, too_hard = pass_rate > self.config.max_pass_rate, pass_rate < self.config.min_pass_rate
        return np.where(known & solved, SOLVED, np.where(known & too_hard, TOO_HARD, OPEN)).astype(np.uint8)

    def _chances(self, tries: np.ndarray, pass_rate: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Return the probability that a visit to each prompt takes place while the record isn't exhausted, float32
        [prompts]."""
        weight = np.ones(len(tries), np.float32)
        if self.config.sampler == "hard":
            weight = 1 - pass_rate
        elif self.config.sampler == "learnable":
            weight = 4 * pass_rate * (1 - pass_rate)
        weight = np.where(tries > 0, np.maximum(weight, self.config.min_weight), 1)
        return np.where(state == OPEN, weight, np.where(state == REPEATED, 0, self.config.retest)).astype(np.float32)

    def _are_hard(self, tries: np.ndarray, pass_rate: np.ndarray, state: np.ndarray) -> np.ndarray:
        return (tries > 0) & (pass_rate <= self.config.replay_below) & (state == OPEN)


class GrowingRecord:
    """A prompt record that grows with the prompts' indices, for readers of a run's files who don't have its data."""

    def __init__(self, config: CurriculumConfig) -> None:
        self.record = PromptRecord(0, config)

    def observe(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Count the rewards of groups, oldest first, as `PromptRecord.observe` does."""
        prompts = 1 + max((line["index"] for line in lines if line.get("index") is not None), default=-1)
        if prompts > len(self.record):
            old, self.record = self.record, PromptRecord(max(prompts, 2 * len(self.record)), self.record.config)
            more = (0, len(self.record) - len(old))
            self.record.restore(np.pad(old.tries, more), np.pad(old.pass_rate, more), old.visits)
        self.record.observe(lines)


def _buckets(pass_rate: np.ndarray) -> np.ndarray:
    return np.minimum(pass_rate * BUCKETS, BUCKETS - 1).astype(np.int64)
