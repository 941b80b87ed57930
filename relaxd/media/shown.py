"""Displays conversations and media: shortened messages, lines of text, thumbnails, excerpts of sounds."""

import base64
import io
import json
import wave
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO
from relaxd.media.prompt_media import MediaRecord
from relaxd.media.sounds import decode_wav
from relaxd.media.videos import count_frames, frames_of

MAX_CHARACTERS = 10_000
"""Maximum number of characters of a displayed message: END_CHARACTERS from its end, the rest from its beginning."""
END_CHARACTERS = 2_000
"""Number of characters from the end of a shortened message that are displayed."""

SHOWN_MEDIA = 4
"""Maximum number of images, videos and sounds of a sample that are shown."""
SHOWN_FRAMES = 4
"""Maximum number of frames in a video's thumbnail, side by side."""
THUMBNAIL_SIDE = 96
"""Maximum width and height of a thumbnail, or of a frame in it, in pixels."""
THUMBNAIL_URI = "data:image/jpeg;base64,"
"""Beginning of the data URI of a thumbnail, a JPEG image."""
EXCERPT_SECONDS = 3
"""Maximum length of the excerpt that is shown of a sound, in seconds."""
EXCERPT_RATE = 8_000
"""Maximum rate of a sound's excerpt, in one-byte samples per second, which keeps excerpts about as small as
thumbnails."""
EXCERPT_URI = "data:audio/wav;base64,"
"""Beginning of the data URI of a sound's excerpt, a WAV file."""


def shown_media(
    contents: Mapping[str, bytes], records: Collection[MediaRecord], *, previews: bool
) -> dict[str, dict[str, Any]]:
    """Return media by their hashes with the fields of ShownMedia in coordinator.proto.

    Args:
        contents: media in their normal form by their hashes.
        records: records of the media to show.
        previews: whether images and videos have thumbnails, and sounds excerpts.
    """
    return {
        name: {"sha256": name, **_FACTS[record["kind"]](contents[name], record, previews)}
        for record in records
        for name in [record["sha256"]]
    }


def _picture_facts(content: bytes, record: MediaRecord, previews: bool) -> dict[str, Any]:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        frames = frames_of(image, count_frames(content, record["grid"]))
        facts: dict[str, Any] = {"width": frames[0].width, "height": frames[0].height}
        if len(frames) > 1:
            facts["frames"] = len(frames)
        return facts | ({"thumbnail": _thumbnail(frames)} if previews else {})


def _sound_facts(content: bytes, record: MediaRecord, previews: bool) -> dict[str, Any]:
    with wave.open(io.BytesIO(content)) as file:
        rate = file.getframerate()
        facts = {"seconds": file.getnframes() / rate}
    return facts | ({"excerpt": _excerpt(content, rate)} if previews else {})


_FACTS: Mapping[str, Callable[[bytes, MediaRecord, bool], dict[str, Any]]] = {
    IMAGE: _picture_facts,
    VIDEO: _picture_facts,
    AUDIO: _sound_facts,
}


def _thumbnail(frames: "Sequence[Image]") -> str:
    """Return a JPEG as a data URI, with up to SHOWN_FRAMES evenly spread frames side by side."""
    from PIL import Image

    count = min(len(frames), SHOWN_FRAMES)
    chosen = [frames[(len(frames) - 1) * number // max(count - 1, 1)] for number in range(count)]
    for frame in chosen:
        frame.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    width, height = chosen[0].size
    picture, file = Image.new("RGB", (width * count, height)), io.BytesIO()
    for number, frame in enumerate(chosen):
        picture.paste(frame, (number * width, 0))
    picture.save(file, "JPEG")
    return THUMBNAIL_URI + base64.b64encode(file.getvalue()).decode()


def _excerpt(content: bytes, rate: int) -> str:
    """Return a WAV as a data URI, with the first seconds of a sound in 8-bit samples at a lower rate."""
    together = -(-rate // EXCERPT_RATE)  # number of samples per sample of the excerpt
    first = decode_wav(content)[: EXCERPT_SECONDS * rate]
    means = first[: len(first) // together * together].reshape(-1, together).mean(1)
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 1, rate // together, 0, "NONE", ""))
        written.writeframes(((means + 32768) / 256).astype(np.uint8).tobytes())
    return EXCERPT_URI + base64.b64encode(file.getvalue()).decode()


def media_line(item: Mapping[str, Any]) -> str:
    """Describe a media item in one line, such as "image 3f2a9c01, 640 x 480"."""
    name = str(item["sha256"])[:8]
    if seconds := item.get("seconds"):
        return f"sound {name}, {seconds:.2f} s"
    frames = item.get("frames", 0)
    kind, more = ("video", f", {frames} frames") if frames else ("image", "")
    return f"{kind} {name}, {item['width']} x {item['height']}{more}"


def shown_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a conversation's message for display, with the fields of ShownMessage in coordinator.proto."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text") or f"<{part.get('type', 'media')}>" for part in content)
    calls = [
        f"{call['function']['name']} {json.dumps(call['function']['arguments'], ensure_ascii=False)}"
        for call in message.get("tool_calls", ())
    ]
    return {"role": str(message["role"]), "content": cut(content), "tool_calls": [cut(call) for call in calls]}


def cut(text: str) -> str:
    """Cut the middle out of a text of more than MAX_CHARACTERS characters."""
    left_out = len(text) - MAX_CHARACTERS
    if left_out <= 0:
        return text
    begin = MAX_CHARACTERS - END_CHARACTERS
    return f"{text[:begin]} ... ({left_out} characters) ... {text[-END_CHARACTERS:]}"


def conversation_lines(sample: Mapping[str, Any]) -> list[str]:
    """Return a trained sample's conversation as lines of text, message by message, and its outcome; [] if the sample
    has no conversation."""
    lines = []
    for message in sample.get("conversation", ()):
        lines.append(f"[{message['role']}] {message['content']}")
        lines += [f"-> {call}" for call in message.get("tool_calls", ())]
    if not lines:
        return []
    turns, seconds = sample["turns"], sample["environment_seconds"]
    outcome = f"({turns} turn{'s' * (turns != 1)}, {sample['finish_reason']}; the environment "
    return [*lines, f"{outcome}paid {sample['environment_reward']:.4g} and took {seconds:.2f} s)"]
