"""Prompts that occur more than once, and training prompts that occur in an evaluation set."""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from relaxd.data.examples import Example
from relaxd.data.files.rows import OnDemand
from relaxd.data.sources.columns import Examples

_FEW = 256
"""Fewer hashes are looked up one by one."""
_LAST = 16_384
_BYTES = 8
"""Length of a hash: of a million prompts, two different ones share one with a probability of 3e-8."""


@dataclass(frozen=True)
class Keys:
    """Hashes of prompts, each uint64 [prompts]. A row that is wrong has one of its own."""

    exact: np.ndarray
    """Of the whole prompt, with its tools."""
    normalised: np.ndarray
    """The same, regardless of case and white space."""
    answers: np.ndarray
    """Of the answer."""


@dataclass(frozen=True)
class Repeats:
    """Numbers of prompts of a source that occur again."""

    exact: int
    """Prompts that are exactly like an earlier one."""
    normalised: int
    """Prompts that equal an earlier one, regardless of case and white space."""
    other_answers: int
    """Of these, those with another answer than the first of them."""


def keys_of(examples: Sequence[Example]) -> Keys:
    """Read all prompts and return their hashes. About 25 microseconds and 24 bytes for each."""
    keys = np.empty((3, len(examples)), np.uint64)
    scanned: Iterable[Example | None] = examples.scan() if isinstance(examples, Examples) else examples
    for number, example in enumerate(scanned):
        if example is None:
            keys[:, number] = _hash(f"\0wrong {number} of {id(examples)}")
            continue
        keys[0, number], keys[1, number] = _hash(_text(example)), key_of(example)
        keys[2, number] = _hash(example.answer)
    return Keys(*keys)


def key_of(example: Example) -> int:
    """Return the hash of a prompt, regardless of case and white space."""
    return _hash(normalised(_text(example)))


def normalised(text: str) -> str:
    """Return a text in Unicode's form C, case-folded, with single spaces. Everything else, such as signs, counts."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def repeats(keys: Keys) -> Repeats:
    """Count what is there more than once."""
    _, first, back = np.unique(keys.normalised, return_index=True, return_inverse=True)
    other = (keys.answers != keys.answers[first[back]]).sum()
    count = len(keys.exact)
    return Repeats(count - len(np.unique(keys.exact)), count - len(first), int(other))


def overlap(keys: Keys, others: Keys) -> int:
    """Count the prompts that are among others, regardless of case and white space."""
    return int(np.isin(keys.normalised, others.normalised).sum())


class Seen:
    """Normalised hashes of prompts that were met so far: 8 bytes each, and about 100 of the last 3 %."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.uint64)
        self._last: set[int] = set()
        """New hashes, which aren't among the sorted ones yet."""

    def __len__(self) -> int:
        return len(self._sorted) + len(self._last)

    def fresh(self, keys: np.ndarray) -> np.ndarray:
        """Add hashes, uint64. Returns which of them weren't met so far, of equal ones the first; bool like `keys`."""
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
    """Some prompts of a source."""

    def __init__(self, examples: Sequence[Example], places: np.ndarray) -> None:
        """`places` are the indices of `examples` that are chosen, int64 [chosen]."""
        self.all = examples
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def _item(self, index: int) -> Example:
        return self.all[int(self.places[index])]


def _merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge sorted arrays."""
    joined = np.concatenate([one, other])
    joined.sort(kind="stable")  # which takes time linear in two sorted parts
    return joined


def _text(example: Example) -> str:
    """Return a prompt as text: whatever the model may see of it counts."""
    parts = []
    for message in example.messages:
        parts.append(f"{message['role']}: {message['content']}")
        if rest := {name: value for name, value in message.items() if name not in ("role", "content")}:
            parts.append(json.dumps(rest, sort_keys=True))
    return "\n".join([*parts, json.dumps(example.tools, sort_keys=True)] if example.tools else parts)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()
    return int.from_bytes(digest, "little")
