"""A source of prompts with random pictures, or with sounds and clips with their own sounds."""

from typing import Any

from tests.kit.sounds import encoded_sound, sound
from tests.kit.vision import Item, SoundClip, clip, encoded, encoded_clip, picture

COUNT = 64
"""Number of prompts."""


def items_of(sort: str, number: int) -> list[Item]:
    """Return the items of a prompt: one picture or two, or a sound or a clip with its own sound."""
    if sort == "images":
        return [picture(64 + 32 * place, 64, 2 * number + place) for place in range(1 + number % 2)]
    if number % 2:
        return [sound(0.5 + 0.1 * (number % 16), number)]
    return [SoundClip(clip(4, 64, 64, number), sound(2.0, number))]


class MediaPrompts:
    """The prompts, whose answers are their numbers."""

    def __init__(self, sort: str) -> None:
        """Make a source of a sort, "images" or "sounds"."""
        self._sort = sort

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        items = items_of(self._sort, index)
        if self._sort == "images":
            row = {"prompt": "<image>" * len(items), "images": [encoded(one) for one in items]}
        elif isinstance(items[0], SoundClip):
            shown = encoded_clip(items[0].frames, 2.0, samples=items[0].samples)
            row = {"prompt": "<video>", "videos": [shown]}
        else:
            row = {"prompt": "<audio>", "sounds": [encoded_sound(items[0])]}
        return row | {"answer": str(index), "prompt": f"{row['prompt']}What is here?"}
