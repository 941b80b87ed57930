"""A set of prompts from which one is drawn at random, each operation in constant time."""

import numpy as np


class Pool:
    """Some of the numbers below `most`. 8 bytes for each of these."""

    def __init__(self, most: int) -> None:
        self._members = np.zeros(most, np.int32)
        """The members come first, in any order."""
        self._place = np.full(most, -1, np.int32)
        """Place of each number among the members; -1 if it is none."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def at(self, draw: float) -> int:
        """Return a member, for 0 <= draw < 1. Raises IndexError: there is none."""
        if not self._size:
            raise IndexError("the pool is empty")
        return int(self._members[min(int(draw * self._size), self._size - 1)])

    def put(self, number: int, inside: bool) -> None:
        """Put a number in, or take it out."""
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
        """Make these numbers the members."""
        self._size = len(numbers)
        self._members[: self._size] = numbers
        self._place[:] = -1
        self._place[numbers] = np.arange(self._size)
