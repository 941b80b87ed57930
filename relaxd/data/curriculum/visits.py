"""The sequence of visits to prompts: the data's epochs, modified by the curriculum."""

from dataclasses import dataclass

import numpy as np

from relaxd.data.curriculum.own_sampler import OwnSampler
from relaxd.data.curriculum.prompt_record import PromptRecord, Visit
from relaxd.data.dataset import Cursor, Prompt, PromptDataset

FIRST_LOOK = 64
"""Number of positions of the first search for the next visit; each further search covers four times as many."""
OWN_CHOICES = 1000
"""Maximum consecutive choices of a user's sampler to skip because the prompts are left out."""


@dataclass(frozen=True)
class Visited:
    """A visit to a prompt."""

    cursor: Cursor
    """Position of the visit. The next search starts at `PromptDataset.after` of it."""
    prompt: Prompt
    """The prompt."""
    why: Visit
    """Reason of the visit."""


@dataclass(frozen=True)
class _Epoch:
    """An epoch: the prompt of each place, and random numbers from 0 to 1. All arrays are [places]."""

    number: int
    order: np.ndarray
    """Indices of the prompts, int32."""
    skip: np.ndarray
    """Random number, float32; a visit takes place if it is below its prompt's chance."""
    replay: np.ndarray
    """Random number, float32, that chooses a hard prompt if it is below curriculum.replay, and also which prompt."""


class Visits:
    """Finds the next visit from any cursor.

    Each place of an epoch has a prompt, which is visited with the prompt's chance (`PromptRecord.chances`). With
    probability curriculum.replay the visit goes to a hard prompt instead. The random numbers depend only on seed and
    place, so a restarted coordinator with the same record continues the same sequence.

    Each place is examined once; a skipped one costs about 20 ns.
    """

    def __init__(self, prompts: PromptDataset, record: PromptRecord, seed: int) -> None:
        self._prompts = prompts
        self._record = record
        self._config = record.config
        self._seed = seed
        self._epoch: _Epoch | None = None
        self._told = 0
        """Number of repeats that the record knows."""
        self._own = OwnSampler(self._config, len(record), seed) if self._config.is_own else None

    def next(self, cursor: Cursor) -> Visited:
        """Return the first visit at or after a cursor.

        Raises DataError: a prompt is too long and may not be left out, all are too long or repeats, a row is wrong, or
        a user's own sampler fails.
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
        """Return whether the prompt at a position is a repeat, and mark all known repeats in the record."""
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
        """Return the first position from `start` on whose visit takes place; None if there is none before `stop`."""
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
        """Call the user's own sampler until it chooses a prompt that isn't left out."""
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
