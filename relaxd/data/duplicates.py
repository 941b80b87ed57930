"""Prompts that are there more than once, and training prompts that are in an evaluation set."""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from relaxd.data.examples import Example
from relaxd.data.files.rows import OnDemand
from relaxd.data.sources.columns import Examples

_BYTES = 8
"""Length of a hash: of a million prompts, two different ones share one with a probability of 3e-8."""


@dataclass(frozen=True)
class Keys:
    """Hashes of prompts, each uint64 [prompts]. A row that is wrong has one of its own."""

    exact: np.ndarray
    """Of the whole prompt, with its tools."""
    normalised: np.ndarray
    """The same, but for upper and lower case and white space."""
    answers: np.ndarray
    """Of the answer."""


@dataclass(frozen=True)
class Repeats:
    """How many prompts of a source are there again."""

    exact: int
    """Prompts that are exactly like an earlier one."""
    normalised: int
    """Prompts that are like an earlier one but for case and white space; those exactly like it included."""
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
        text = _text(example)
        keys[0, number], keys[1, number] = _hash(text), _hash(normalised(text))
        keys[2, number] = _hash(example.answer)
    return Keys(*keys)


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
    """Count the prompts that are among others, but for case and white space."""
    return int(np.isin(keys.normalised, others.normalised).sum())


@dataclass
class Seen:
    """Prompts that were met so far."""

    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    """Their normalised hashes, uint64."""

    def new_places(self, keys: Keys) -> np.ndarray:
        """Return the places of prompts that weren't met so far, of each the first, in order; int64. Adds them."""
        _, first = np.unique(keys.normalised, return_index=True)
        places = np.sort(first)
        places = places[~np.isin(keys.normalised[places], self.keys)]
        self.add(keys)
        return places

    def add(self, keys: Keys) -> None:
        """Add prompts."""
        self.keys = np.union1d(self.keys, keys.normalised)


class Chosen(OnDemand[Example]):
    """Some prompts of a source."""

    def __init__(self, examples: Sequence[Example], places: np.ndarray) -> None:
        self._examples = examples
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def _item(self, index: int) -> Example:
        return self._examples[int(self._places[index])]


def _text(example: Example) -> str:
    parts = [f"{message['role']}: {message['content']}" for message in example.messages]
    return "\n".join([*parts, json.dumps(example.tools, sort_keys=True)] if example.tools else parts)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()
    return int.from_bytes(digest, "little")
