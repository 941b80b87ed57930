"""Makes the tiny model of examples/dots.toml: a Qwen3-VL that answers any video with any side.

`python -m relaxd.tools.dots_beginner FOLDER` makes it. It runs as a separate process, so that the command line needs no
torch.
"""

import sys
from pathlib import Path

from relaxd.media import VIDEO
from relaxd.tools.digit_pictures import encoded
from relaxd.tools.moving_dots import FRAMES, PROMPT, SIDE, SIDES, draw
from relaxd.tools.sight_beginner import Task, make

TASK = Task(
    VIDEO,
    PROMPT.removeprefix("<video>"),
    list(SIDES),
    lambda seed: [encoded(frame) for frame in draw(seed)[1]],
    SIDE,
    FRAMES,
)

if __name__ == "__main__":
    make(Path(sys.argv[1]), TASK)
