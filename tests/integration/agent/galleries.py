"""Environments that show pictures, videos and sounds, and what can't be shown."""

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from relaxd.envs.environment import Reply, Sample, Step
from tests.kit.sounds import RATE, encoded_sound, sound
from tests.kit.vision import clip, encoded, encoded_clip, picture

SHOWN = [picture(64, 64, 1), picture(100, 60, 2), picture(64, 64, 3), picture(64, 64, 4)]
"""Pictures of `Gallery`: one with which it opens, and those of its answers."""

OTHER = picture(70, 130, 5)
"""A picture of the size of the prompt's."""


class Gallery:
    """Shows pictures in each of the forms that Python has, and the prompt's again."""

    def __init__(self, folder: str, opens: bool = False) -> None:
        self._path = Path(folder) / "shown.png"
        self._opens = opens
        self._turn = 0

    def open(self, sample: Sample) -> Any:
        """Show the first picture, or nothing."""
        self._prompt = sample.messages[-1]["content"]
        shown = [{"type": "image", "image": SHOWN[0]}, "Look <|image_pad|>!"]
        return {"role": "user", "content": shown} if self._opens else None

    def step(self, reply: Reply) -> Step:
        """Show two pictures, then one, then end."""
        self._turn += 1
        SHOWN[2].save(self._path)
        answers: list[list[Any]] = [
            ["Two: ", {"type": "image", "image": SHOWN[1]}, {"type": "image", "image": str(self._path)}],
            [{"type": "image", "image": encoded(SHOWN[3])}, *[one for one in self._prompt if one["type"] == "image"]],
        ]
        is_over = self._turn > len(answers)
        messages = None if is_over else [{"role": "tool", "content": answers[self._turn - 1]}]
        return Step(messages, 1.0, is_over)


def item(kind: str, seed: int) -> Any:
    """Return an item, one of several of equal size, in one of the forms that Python has."""
    if kind == "image":
        return picture(64, 64, seed)
    if kind == "clip":  # a video with its own sound
        return encoded_clip(clip(4, 64, 64, seed), 2.0, samples=sound(1.5, seed))
    if kind == "video":
        frames = clip(4, 64, 64, seed)
        return encoded_clip(frames, 2.0) if seed == 1 else frames
    samples = sound(0.5, seed)
    return encoded_sound(samples) if seed == 1 else {"array": samples / 32768, "sampling_rate": RATE}


class Theatre:
    """Shows or plays items of a kind with pictures between them, and the prompt's again."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._turn = 0

    def open(self, sample: Sample) -> Any:
        """Show a first item."""
        self._prompt = sample.messages[-1]["content"]
        return {"role": "user", "content": ["First: ", self._part(1), "?"]}

    def step(self, reply: Reply) -> Step:
        """Show two items around a picture, then the prompt's, then end."""
        self._turn += 1
        between = {"type": "image", "image": SHOWN[0]}
        answers = [[self._part(2), "or", between, self._part(3)], self._prompt]
        is_over = self._turn > len(answers)
        return Step(None if is_over else [{"role": "tool", "content": answers[self._turn - 1]}], 1.0, is_over)

    def _part(self, seed: int) -> dict[str, Any]:
        kind = "video" if self._kind == "clip" else self._kind
        return {"type": kind, kind: item(self._kind, seed)}


class Large:
    """Shows a picture of 6 MB."""

    def step(self, reply: Reply) -> Step:
        """Show it, and end."""
        part = {"type": "image", "image": encoded(picture(1400, 1400), "BMP")}
        return Step({"role": "user", "content": [part]}, 1.0, done=True)


class Wrong:
    """Shows what can't be shown, as the model's message says."""

    def step(self, reply: Reply) -> Step:
        """Show it."""
        file = BytesIO()
        Image.new("1", (7_000, 7_000)).save(file, "PNG")
        part: dict[str, Any] = {"type": "image"}
        match reply.text:
            case "broken":
                part["image"] = encoded(SHOWN[0])[:300]
            case "large":
                part["image"] = file.getvalue()
            case "missing":
                part["image"] = "/nowhere/picture.png"
            case "fetched":
                part["image"] = "https://user:secret@example.com/a.png"
            case "video":
                part = {"type": "video", "video": SHOWN[:2]}
        return Step([{"role": "user", "content": ["Look", part]}])
