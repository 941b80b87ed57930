"""A tool that shows an enlarged part of a picture, like that of DeepEyes (arXiv 2505.14362)."""

from typing import Any

from relaxd.envs.environment import BadEnvironmentError, Sample
from relaxd.envs.function_tools import FunctionTool, ToolsEnvironment
from relaxd.media.images import MIN_SIDE, open_upright
from relaxd.media.placeholders import IMAGE
from relaxd.media.sources import MediaError

FULL = 1000
"""Coordinate of a picture's right and lower edges. The left and upper edges have the coordinate 0."""


class Zoom(ToolsEnvironment):
    """Answers calls of the tool `zoom`; the first message without a call is the answer, which the run's reward scores.

    Numbers: `calls`, and `errors` (failed calls).
    """

    def __init__(self, column: str = "original", min_side: int = 0) -> None:
        """Create the tool.

        Args:
            column: the key of the whole picture in the prompt's metadata: a path, bytes in base64 or a data URI.
                data.original_key puts it into the default. Without this key the tool uses the prompt's first image, in
                the size that the model sees.
            min_side: minimum length of the longer side of a shown part, in pixels: smaller parts are enlarged.

        Raises ValueError: min_side is negative.
        """
        super().__init__([FunctionTool(self.zoom)])
        if min_side < 0:
            raise ValueError(f"min_side is {min_side}: it must be at least 0")
        self._column, self._min_side = column, min_side
        self._picture: Any = None

    def open(self, sample: Sample) -> None:
        """Begin a conversation. Raises BadEnvironmentError if the picture can't be read."""
        parts = [part for one in sample.messages if isinstance(one["content"], list) for part in one["content"]]
        shown = next((part["image"] for part in parts if part["type"] == IMAGE), None)
        if (source := sample.metadata.get(self._column, shown)) is None:
            raise BadEnvironmentError(f'the prompt has no image, and its data no column "{self._column}" with one')
        try:
            self._picture = open_upright(source)
        except MediaError as error:
            what = f'column "{self._column}"' if self._column in sample.metadata else "the prompt's image"
            raise BadEnvironmentError(f"{what}: the picture {error}") from error

    def zoom(self, box: list[float]) -> Any:  # the class of Pillow, which is imported when it is needed
        """Show a part of the picture, enlarged.

        Args:
            box: its left, upper, right and lower edge, as numbers from 0 to 1000.
        """
        if len(box) != 4 or not (0 <= box[0] < box[2] <= FULL and 0 <= box[1] < box[3] <= FULL):
            raise ValueError(f"box is {box}: it must be [left, upper, right, lower], from 0 to {FULL}")
        width, height = self._picture.size
        left, upper, right, lower = (
            round(edge * side / FULL) for edge, side in zip(box, (width, height) * 2, strict=True)
        )
        part = self._picture.crop((left, upper, right, lower))
        if min(part.size) < MIN_SIDE:
            raise ValueError(f"box is {box}, {part.width} x {part.height} pixels: each side must have {MIN_SIDE}")
        if (scale := self._min_side / max(part.size)) > 1:
            part = part.resize((round(part.width * scale), round(part.height * scale)))
        return part
