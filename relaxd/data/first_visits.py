"""Comparison of a large file's prompts while they are visited, so that a run begins before all of them were read."""

import logging
import os
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from relaxd.data.duplicates import Seen, key_of
from relaxd.data.examples import Example
from relaxd.waiting import waiting

logger = logging.getLogger(__name__)

_UNKNOWN, _FIRST, _REPEAT = 0, 1, 2
_HASHED = 256
"""Prompts that are read between two notes of how far the comparison is."""
_KEPT = 1 << 20
"""Hashes that are read at once from the file."""
_WRITTEN = 1024
"""Number of hashes that are written at once, and thus of prompts that may be read again after a crash."""
_SAMPLES = 8
"""Hashes of each part of the file that are compared with their prompts."""
_WAIT = 4 * _HASHED
"""Number of prompts from which the comparison is named as a wait."""
_BYTES = 8


class FirstVisits:
    """Tells whether a place of the sequence of visits has a prompt that an earlier place has, or an evaluation set.

    Of equal prompts the one stays that the sequence visits first. So the answer depends on the data and run.seed alone,
    and needs only the hashes of the prompts before that place. These are kept in a file, 8 bytes each in the order of
    visits, from which a restarted coordinator takes them; what the file lacks is hashed again.

    A prompt costs 1 byte from the start, and about 11 more bytes once it was visited.
    """

    def __init__(self, prompts: int, seen: Seen, read: Callable[[int], Example]) -> None:
        """`seen` has the prompts of evaluation sets. `read` returns a prompt by its index, or raises DataError."""
        self._seen = seen
        self._read = read
        self._state = np.zeros(prompts, np.uint8)
        self._next = (0, 0)
        """The first place that wasn't compared."""
        self._compared = 0
        """Prompts that were."""
        self.repeats = array("q")
        """Indices of those that are left out, in the order in which they were found."""
        self._path: Path | None = None
        self._saved = 0
        """Hashes in the file."""
        self._unsaved: list[int] = []

    def keep(self, path: Path) -> None:
        """Keep hashes in a file, and take those that it has; before the first question."""
        self._path = path
        self._saved = path.stat().st_size // _BYTES if path.is_file() else 0

    def is_repeat(self, place: tuple[int, int], order: Callable[[int], np.ndarray]) -> bool:
        """Return whether a place has a repeat; `order` returns the indices that an epoch visits.

        Raises DataError: a prompt before that place, or there, can't be read.
        """
        epoch, position = place
        if self._next <= place and self._compared < len(self._state):
            if self._next[0] == epoch and position - self._next[1] < _WAIT:
                self._go_on(epoch, order(epoch), position + 1)
            else:  # after a start
                with waiting(f"the comparison of all prompts before place {position} of epoch {epoch}"):
                    for earlier in range(self._next[0], epoch):
                        visits = order(earlier)
                        self._go_on(earlier, visits, len(visits))
                    self._go_on(epoch, order(epoch), position + 1)
        return bool(self._state[order(epoch)[position]] == _REPEAT)

    def _go_on(self, epoch: int, visits: np.ndarray, stop: int) -> None:
        """Compare the prompts of an epoch's places before `stop`."""
        while self._next < (epoch, stop):
            start = self._next[1]
            end = min(stop, start + (_KEPT if self._saved > self._compared else _HASHED))
            self._compare(visits[start:end])
            self._next = (epoch, end) if end < len(visits) else (epoch + 1, 0)

    def _compare(self, indices: np.ndarray) -> None:
        new = indices[self._state[indices] == _UNKNOWN]
        if len(new) > 1:
            _, first = np.unique(new, return_index=True)
            new = new[np.sort(first)]
        if not len(new):
            return
        fresh = self._seen.fresh(self._keys(new))
        self._state[new] = np.where(fresh, _FIRST, _REPEAT)
        self.repeats.extend(new[~fresh].tolist())
        self._compared += len(new)
        if self._compared == len(self._state):
            self._write()
            logger.info("all %d prompts are compared: %d are left out", self._compared, len(self.repeats))

    def _keys(self, new: np.ndarray) -> np.ndarray:
        """Return the hashes of the prompts that come next, uint64 like `new`."""
        kept = self._from_file(new)
        hashed = [key_of(self._read(int(index))) for index in new[len(kept) :]]
        self._unsaved += hashed
        if len(self._unsaved) >= _WRITTEN:
            self._write()
        return np.concatenate([kept, np.array(hashed, np.uint64)])

    def _from_file(self, new: np.ndarray) -> np.ndarray:
        count = min(len(new), self._saved - self._compared)
        if self._path is None or count <= 0:
            return np.empty(0, np.uint64)
        kept = np.fromfile(self._path, np.uint64, count, offset=self._compared * _BYTES)
        some = range(0, len(kept), -(-len(kept) // _SAMPLES) or 1)
        if len(kept) < count or any(key_of(self._read(int(new[place]))) != int(kept[place]) for place in some):
            logger.warning("%s has other prompts than the data, which is read again", self._path)
            self._saved = self._compared
            os.truncate(self._path, self._saved * _BYTES)
            return np.empty(0, np.uint64)
        return kept

    def _write(self) -> None:
        """Write hashes to where they belong: another coordinator that still lives writes the same there."""
        if self._path is None:
            self._unsaved = []
            return
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, np.array(self._unsaved, np.uint64).tobytes(), self._saved * _BYTES)
            finally:
                os.close(file)
        except OSError as error:  # it only saves time at the next start
            logger.warning("%s can't be written: %s", self._path, error)
            self._path = None
        self._saved += len(self._unsaved)
        self._unsaved = []
