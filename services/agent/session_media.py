"""Images in the requests of one session. In its messages they stand by reference, as in those of environments."""

import hashlib
from collections.abc import Sequence
from typing import Any

from relaxd.data.examples import Message
from relaxd.data.vision import VisionModel
from relaxd.envs.observation_media import is_data_uri
from relaxd.media import MediaError, normalise_image
from relaxd.media.placeholders import IMAGE, Content
from relaxd.media.prompt_media import StoredMedia, reference_part
from relaxd.media.sources import data_uri
from services.agent.chat_requests import BadRequest


class SessionMedia:
    """The images of a session, each of which is decoded once. Threads may read images at the same time."""

    def __init__(self, vision: VisionModel | None = None, prompt: Sequence[StoredMedia] = ()) -> None:
        """`vision` has the model's rules, None in a run without images; `prompt` are the images of the prompt."""
        self.vision = vision
        self._by_hash = {item.sha256: item for item in prompt}
        self._by_uri = {_digest(data_uri(item.png)): item for item in prompt}
        """Images by data URI. Those of the prompt, which programs get in the normal form, aren't resized again."""

    def read(self, place: str, uri: Any) -> dict[str, Any]:
        """Return the part that stands for an image. Raises BadRequest: it is no data URI, or can't be read."""
        if self.vision is None:
            raise BadRequest(f"{place} is an image, but agent.images is false: set it to true", place)
        if not is_data_uri(uri):
            raise BadRequest(
                f"{place} has no image in it: send its content, such as "
                '"data:image/png;base64,..."; relaxd fetches no media',
                place,
            )
        digest = _digest(uri)
        if (item := self._by_uri.get(digest)) is None:
            try:
                item = StoredMedia.of(normalise_image(uri, self.vision.rule))
            except MediaError as error:
                raise BadRequest(f"{place} {error}", place) from error
            item = self._by_uri[digest] = self._by_hash.setdefault(item.sha256, item)
        return reference_part(item)

    def of(self, messages: Sequence[Message]) -> list[StoredMedia]:
        """Return the images of messages, in order."""
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        return [self._by_hash[part["sha256"]] for content in contents for part in content if part["type"] == IMAGE]


def joined(parts: Sequence[dict[str, Any]]) -> Content:
    """Return parts as a content, in which texts that follow each other are one: a text if there are no images."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text" or not found or found[-1]["type"] != "text":
            found.append(part)
        else:
            found[-1] = {"type": "text", "text": found[-1]["text"] + part["text"]}
    if any(part["type"] != "text" for part in found):
        return [part for part in found if part.get("text") != ""]
    return found[0]["text"] if found else ""


def _digest(uri: str) -> bytes:
    return hashlib.sha256(uri.encode(errors="replace")).digest()
