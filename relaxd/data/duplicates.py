"""Duplicates: prompts that occur more than once or in an evaluation set. They are found before the run or, in a large
file, when its prompts are visited."""

import hashlib
import json
import logging
import os
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaxd.data.examples import Example
from relaxd.data.rows import OnDemand
from relaxd.data.sources.prompt_columns import Examples
from relaxd.media.sources import content_hash
from relaxd.waiting import waiting

logger = logging.getLogger(__name__)

_FEW = 256
"""Number of hashes below which each hash is looked up separately, instead of all together."""
_LAST = 16_384
_BYTES = 8
"""Length of a prompt's hash, in bytes. Among a million prompts, a collision has a probability of 3e-8."""


@dataclass(frozen=True)
class Keys:
    """Hashes of the prompts of a source, as arrays uint64 [prompts]. Invalid rows get a unique hash."""

    exact: np.ndarray
    """Hash of each whole prompt, with its tools."""
    normalised: np.ndarray
    """Hash of each whole prompt, regardless of case and white space."""
    answers: np.ndarray
    """Hash of each prompt's reference answer."""


@dataclass(frozen=True)
class Repeats:
    """Number of repeated prompts of a source, by kind of repetition."""

    exact: int
    """Number of prompts that are exactly like an earlier prompt."""
    normalised: int
    """Number of prompts that equal an earlier prompt, regardless of case and white space."""
    other_answers: int
    """Number of normalised repeats whose reference answer differs from that of the first such prompt."""


def keys_of(examples: Sequence[Example]) -> Keys:
    """Read all prompts and return their hashes. Takes about 25 microseconds and 24 bytes for each prompt.

    The contents of media count, so their files are read, too.
    """
    keys = np.empty((3, len(examples)), np.uint64)
    scanned: Iterable[Example | None] = examples.scan() if isinstance(examples, Examples) else examples
    for number, example in enumerate(scanned):
        if example is None:
            keys[:, number] = _hash(f"\0wrong {number} of {id(examples)}")
            continue
        text = _text(example)
        keys[0, number], keys[1, number] = _hash(text), _hash(normalised(text))
        keys[2, number] = _hash(example.answer)
    return Keys(*keys)


def key_of(example: Example) -> int:
    """Return the hash of a prompt, regardless of case and white space."""
    return _hash(normalised(_text(example)))


def normalised(text: str) -> str:
    """Return a text in Unicode's form C, case-folded, with single spaces. Other characters, such as signs, are kept."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def repeats(keys: Keys) -> Repeats:
    """Count the prompts of a source that repeat an earlier prompt."""
    _, first, back = np.unique(keys.normalised, return_index=True, return_inverse=True)
    other = (keys.answers != keys.answers[first[back]]).sum()
    count = len(keys.exact)
    return Repeats(count - len(np.unique(keys.exact)), count - len(first), int(other))


def overlap(keys: Keys, others: Keys) -> int:
    """Count the prompts that occur in another source, regardless of case and white space."""
    return int(np.isin(keys.normalised, others.normalised).sum())


class Seen:
    """Set of the normalised hashes of all prompts seen so far. A hash takes 8 bytes; the newest 3 % take about 100
    bytes each."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.uint64)
        self._last: set[int] = set()
        """Newest hashes, which aren't merged into the sorted array yet."""

    def __len__(self) -> int:
        return len(self._sorted) + len(self._last)

    def fresh(self, keys: np.ndarray) -> np.ndarray:
        """Add hashes, uint64 [keys]. Returns a mask of those that are new, bool [keys]; if a new hash occurs several
        times, only its first place is True."""
        if len(keys) < _FEW:
            found = np.array([self._is_fresh(key) for key in keys], bool)
            if len(self._last) > max(_LAST, len(self._sorted) // 32):
                self._sort()
            return found
        self._sort()
        unique, first = np.unique(keys, return_index=True)
        places = np.searchsorted(self._sorted, unique)
        known = np.zeros(len(unique), bool)
        inside = places < len(self._sorted)
        known[inside] = self._sorted[places[inside]] == unique[inside]
        found = np.zeros(len(keys), bool)
        found[first[~known]] = True
        self._sorted = _merged(self._sorted, unique[~known])
        return found

    def _is_fresh(self, key: np.uint64) -> bool:
        number = int(key)
        if number in self._last:
            return False
        place = int(np.searchsorted(self._sorted, key))
        if place < len(self._sorted) and self._sorted[place] == key:
            return False
        self._last.add(number)
        return True

    def _sort(self) -> None:
        self._sorted = _merged(self._sorted, np.sort(np.fromiter(self._last, np.uint64, len(self._last))))
        self._last = set()


class Chosen(OnDemand[Example]):
    """Selection of some prompts of a source."""

    def __init__(self, examples: Sequence[Example], places: np.ndarray) -> None:
        """Select the prompts of `examples` with the indices `places`, int64 [chosen]."""
        self.all = examples
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def _item(self, index: int) -> Example:
        return self.all[int(self.places[index])]


def _merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge two sorted arrays of hashes into a sorted array."""
    joined = np.concatenate([one, other])
    joined.sort(kind="stable")  # which takes time linear in two sorted parts
    return joined


def _text(example: Example) -> str:
    """Return all content of a prompt that the model may see, as text to hash."""
    parts = []
    for message in example.messages:
        parts.append(f"{message['role']}: {message['content']}")
        if rest := {name: value for name, value in message.items() if name not in ("role", "content")}:
            parts.append(json.dumps(rest, sort_keys=True))
    parts += [f"{item.kind}: {content_hash(item.source)}" for item in example.media]
    return "\n".join([*parts, json.dumps(example.tools, sort_keys=True)] if example.tools else parts)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()
    return int.from_bytes(digest, "little")


_UNKNOWN, _FIRST, _REPEAT = 0, 1, 2
_HASHED = 256
"""Number of prompts that are hashed and compared at once."""
_KEPT = 1 << 20
"""Number of stored hashes that are read from the file and compared at once."""
_WRITTEN = 1024
"""Number of hashes that are written to the file at once. After a crash, at most this many prompts are read again."""
_SAMPLES = 8
"""Maximum number of stored hashes that are checked against their prompts, in each part that is read from the file."""
_WAIT = 4 * _HASHED
"""Minimum number of prompts whose comparison is logged as a wait."""


class FirstVisits:
    """Finds repeats: visits to a prompt that equals a prompt visited earlier, or a prompt of an evaluation set.

    The first visit among equal prompts isn't a repeat. So the answer depends only on the data and run.seed, and needs
    only the hashes of the prompts visited before. The hashes are stored in a file for a restarted coordinator, 8 bytes
    each in the order of visits; missing hashes are computed again.

    A prompt takes 1 byte of memory from the start, and about 11 more bytes once it was visited.
    """

    def __init__(self, prompts: int, seen: Seen, read: Callable[[int], Example]) -> None:
        """Prepare the search among `prompts` prompts. `seen` has the hashes of the evaluation sets' prompts. `read`
        returns a prompt by its index, or raises DataError."""
        self._seen = seen
        self._read = read
        self._state = np.zeros(prompts, np.uint8)
        self._next = (0, 0)
        """Epoch and position of the first visit whose prompt wasn't compared yet."""
        self._compared = 0
        """Number of prompts that were compared so far."""
        self.repeats = array("q")
        """Indices of the repeats that are left out, in the order in which they were found."""
        self._path: Path | None = None
        self._saved = 0
        """Number of hashes that the file already has."""
        self._unsaved: list[int] = []

    def keep(self, path: Path) -> None:
        """Store hashes in a file from now on, and use the hashes that it already has. Call it before the first
        `is_repeat`."""
        self._path = path
        self._saved = path.stat().st_size // _BYTES if path.is_file() else 0

    def is_repeat(self, place: tuple[int, int], order: Callable[[int], np.ndarray]) -> bool:
        """Return True if the visit at this place (epoch, position) is a repeat. `order` returns the indices that an
        epoch visits.

        Raises DataError if a prompt at that place or before it can't be read.
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
        """Compare the prompts at an epoch's positions before `stop` that weren't compared yet."""
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
        """Return the hashes of the next prompts, from the file or computed, uint64 [new]."""
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
        """Write the unsaved hashes at their fixed offsets in the file. Another live coordinator would write the same
        hashes there."""
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
