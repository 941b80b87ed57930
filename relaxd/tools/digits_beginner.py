"""Makes the tiny model of examples/digits.toml: a Qwen3-VL that answers any picture with any digit.

`python -m relaxd.tools.digits_beginner FOLDER` makes it. It runs as a separate process, so that the command line needs
no torch.
"""

import sys
from pathlib import Path

from relaxd.media import IMAGE
from relaxd.tools.digit_pictures import DIGITS, PROMPT, SIDE, draw, encoded
from relaxd.tools.sight_beginner import Task, make

TASK = Task(
    IMAGE, PROMPT.removeprefix("<image>"), list(map(str, range(DIGITS))), lambda seed: encoded(draw(seed)[1]), SIDE
)

if __name__ == "__main__":
    make(Path(sys.argv[1]), TASK)
