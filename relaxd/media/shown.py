"""Conversations and images as people see them: messages with short texts, lines of those, and thumbnails."""

import base64
import io
import json
from collections.abc import Collection, Mapping
from typing import Any

MAX_CHARACTERS = 10_000
"""Maximum number of characters of a message that are shown: most of them its beginning, and its end."""
END_CHARACTERS = 2_000
"""Those of its end."""

SHOWN_IMAGES = 4
"""Maximum number of images of a sample that are shown."""
THUMBNAIL_SIDE = 96
"""Maximum width and height of a thumbnail, in pixels."""
THUMBNAIL_URI = "data:image/jpeg;base64,"
"""Beginning of a thumbnail."""


def shown_images(
    contents: Mapping[str, bytes], names: Collection[str], *, thumbnails: bool
) -> dict[str, dict[str, Any]]:
    """Return images by their hashes with the fields of ShownImage in coordinator.proto.

    Args:
        contents: images in their normal form by their hashes.
        names: hashes of those to show.
        thumbnails: whether they have thumbnails.
    """
    from PIL import Image

    found: dict[str, dict[str, Any]] = {}
    for name in names:
        with Image.open(io.BytesIO(contents[name])) as image:
            shown = {"sha256": name, "width": image.width, "height": image.height}
            if thumbnails:
                image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
                file = io.BytesIO()
                image.save(file, "JPEG")
                shown["thumbnail"] = THUMBNAIL_URI + base64.b64encode(file.getvalue()).decode()
        found[name] = shown
    return found


def image_line(image: Mapping[str, Any]) -> str:
    """Return an image of a sample as text, such as "image 3f2a9c01, 640 x 480"."""
    return f"image {str(image['sha256'])[:8]}, {image['width']} x {image['height']}"


def shown_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a conversation with the fields of ShownMessage in coordinator.proto."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text") or f"<{part.get('type', 'media')}>" for part in content)
    calls = [
        f"{call['function']['name']} {json.dumps(call['function']['arguments'], ensure_ascii=False)}"
        for call in message.get("tool_calls", ())
    ]
    return {"role": str(message["role"]), "content": cut(content), "tool_calls": [cut(call) for call in calls]}


def cut(text: str) -> str:
    """Leave out the middle of a very long text."""
    left_out = len(text) - MAX_CHARACTERS
    if left_out <= 0:
        return text
    begin = MAX_CHARACTERS - END_CHARACTERS
    return f"{text[:begin]} ... ({left_out} characters) ... {text[-END_CHARACTERS:]}"


def conversation_lines(sample: Mapping[str, Any]) -> list[str]:
    """Return the lines of a trained sample's conversation, message by message, and its outcome; [] if it is none."""
    lines = []
    for message in sample.get("conversation", ()):
        lines.append(f"[{message['role']}] {message['content']}")
        lines += [f"-> {call}" for call in message.get("tool_calls", ())]
    if not lines:
        return []
    turns, seconds = sample["turns"], sample["environment_seconds"]
    outcome = f"({turns} turn{'s' * (turns != 1)}, {sample['finish_reason']}; the environment "
    return [*lines, f"{outcome}paid {sample['environment_reward']:.4g} and took {seconds:.2f} s)"]
