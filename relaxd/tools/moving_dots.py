"""Prompt source of examples/dots.toml: videos of a moving dot; the answer is the side to which it moves.

A movement to the left has the frames of a movement to the right in reverse order.
"""

from random import Random
from typing import Any

from PIL import Image, ImageDraw

from relaxd.tools.digit_pictures import GREY, DrawnPrompts, encoded

PROMPT = "<video>Where does the dot go?"
SIDES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Possible answers, each with the direction (x, y) in which the dot moves."""
FRAMES = 4
SIDE = 32
"""Width and height of a frame, in pixels."""
RADIUS = 4
STEPS = (4.0, 6.0)
"""Minimum and maximum distance that a dot moves per frame, in pixels."""
MIDDLE = (12.0, 20.0)
"""Minimum and maximum of both coordinates of the middle of a dot's path, in pixels."""


class MovingDots(DrawnPrompts):
    """Prompt source whose prompts show a video of a moving dot and ask to which side it moves."""

    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return the data row of a prompt: prompt, answer, and in the column "videos" the video as a list of frames."""
        answer, frames = draw(seed)
        if blank:
            frames = [Image.new("RGB", (SIDE, SIDE), (GREY, GREY, GREY))] * FRAMES
        return {"prompt": PROMPT, "answer": answer, "videos": [[encoded(frame) for frame in frames]]}


def draw(seed: int) -> tuple[str, list[Image.Image]]:
    """Draw the frames of a dot that moves to a random side, with random path, speed and colours.

    Returns the side and the frames.
    """
    random = Random(seed)
    answer = random.choice(list(SIDES))
    ground = tuple(random.randrange(0, 60) for _ in range(3))
    ink = tuple(random.randrange(195, 256) for _ in range(3))
    middle, step = (random.uniform(*MIDDLE), random.uniform(*MIDDLE)), random.uniform(*STEPS)
    frames = []
    for number in range(FRAMES):
        way = step * (number - (FRAMES - 1) / 2)
        x, y = (place + way * side for place, side in zip(middle, SIDES[answer], strict=True))
        frame = Image.new("RGB", (SIDE, SIDE), ground)
        ImageDraw.Draw(frame).ellipse((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), ink)
        frames.append(frame)
    return answer, frames
