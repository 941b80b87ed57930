"""Sources of prompts for examples, whose pictures or videos are drawn from a seed each."""

from abc import ABC, abstractmethod
from typing import Any, Self

HELD_OUT = 200
"""Number of held-out prompts. Their seeds follow those of the training prompts."""


class DrawnPrompts(ABC):
    """A source of prompts (docs/data.md, "A source of your own"), each with a drawn picture or video."""

    def __init__(self, count: int = 2500, blank: bool = False, first: int = 0) -> None:
        """Make a source.

        Args:
            count: number of prompts.
            blank: whether everything that tells the answer is grey instead.
            first: seed of the first prompt.
        """
        self._count, self._blank, self._first = count, blank, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        return self.row(self._first + index, blank=self._blank)

    def held_out(self) -> Self:
        """Return different prompts for evaluation."""
        return type(self)(HELD_OUT, self._blank, self._first + self._count)

    @abstractmethod
    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return the row of a seed."""
