"""Source of prompts of examples/zoom.toml: wide pictures with a digit in one half, which prompts show small."""

from random import Random
from typing import Any, Self

from PIL import Image

from relaxd.tools.digit_pictures import GREY, HELD_OUT, SIDE, draw, encoded

PROMPT = "<image>Which digit is this?"
HALVES = ((0, 0, 500, 1000), (500, 0, 1000, 1000))
"""The parts of a picture that may have the digit, as the tool `zoom` wants them."""
SHOWN = (SIDE, SIDE // 2)
"""Width and height of a picture in a prompt, in pixels: half as wide and high as it is."""


class ZoomPictures:
    """A source of prompts, each with a small picture, and the whole one in the column "original"."""

    def __init__(self, count: int = 5000, blank: bool = False, first: int = 0) -> None:
        """Make a source.

        Args:
            count: number of pictures.
            blank: whether the whole pictures are grey, so that the tool shows nothing.
            first: seed of the first picture.
        """
        self._count, self._blank, self._first = count, blank, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        digit, _, picture = draw_wide(self._first + index)
        small = encoded(picture.resize(SHOWN))
        if self._blank:
            picture = Image.new("RGB", picture.size, (GREY, GREY, GREY))
        return {"prompt": PROMPT, "answer": str(digit), "images": [small], "original": encoded(picture)}

    def held_out(self) -> Self:
        """Return other pictures, for evaluation."""
        return type(self)(HELD_OUT, self._blank, self._first + self._count)


def draw_wide(seed: int) -> tuple[int, tuple[int, ...], Image.Image]:
    """Return a random digit, the half that it is in, and a picture of it."""
    digit, picture = draw(seed)
    half = Random(f"half {seed}").randrange(len(HALVES))
    wide = Image.new("RGB", (2 * SIDE, SIDE))
    wide.paste(picture, (half * SIDE, 0))
    return digit, HALVES[half], wide
