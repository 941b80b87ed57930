"""Media in the requests of one session. Its messages refer to media by hash, like environments' messages."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from relaxd.data.examples import Message
from relaxd.data.vision import VisionModel, normalise_shown
from relaxd.envs.observation_media import is_sent
from relaxd.media.placeholders import Content
from relaxd.media.prompt_media import StoredMedia, reference_part
from relaxd.media.sources import MediaError
from services.agent.chat_requests import BadRequest


class SessionMedia:
    """The media of a session, each decoded once. Several threads may call `read`."""

    def __init__(self, vision: VisionModel | None = None, prompt: Sequence[StoredMedia] = ()) -> None:
        """`vision`: the model's media rules, None in a run without media; `prompt`: media of the prompt."""
        self.vision = vision
        self._by_hash = {item.sha256: item for item in prompt}
        self._by_source = {_digest(item.kind, item.uri): item for item in prompt}
        """Media by digest of kind and data URI. The prompt's media are in normal form already and used unchanged."""

    def read(self, place: str, kind: str, source: Any) -> dict[str, Any]:
        """Decode a data URI and return a part that refers to it. Raises BadRequest if it isn't one or can't be read."""
        if not is_sent(source):
            raise BadRequest(
                f'{place} has no {kind} in it: send its content, such as "data:image/png;base64,..."; relaxd fetches '
                "no media",
                place,
            )
        digest = _digest(kind, source)
        if (item := self._by_source.get(digest)) is None:
            try:
                item = StoredMedia.of(normalise_shown(kind, source, self.vision))
            except MediaError as error:
                raise BadRequest(f"{place} {error}", place) from error
            item = self._by_source[digest] = self._by_hash.setdefault(item.sha256, item)
        return reference_part(item)

    def of(self, messages: Sequence[Message]) -> list[StoredMedia]:
        """Return the media of messages, in order."""
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        return [self._by_hash[part["sha256"]] for content in contents for part in content if part["type"] != "text"]


def joined(parts: Sequence[dict[str, Any]]) -> Content:
    """Return parts as a message's content: consecutive texts joined, and a single text if it has no media."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text" or not found or found[-1]["type"] != "text":
            found.append(part)
        else:
            found[-1] = {"type": "text", "text": found[-1]["text"] + part["text"]}
    if any(part["type"] != "text" for part in found):
        return [part for part in found if part.get("text") != ""]
    return found[0]["text"] if found else ""


def _digest(kind: str, source: str | list[str]) -> bytes:
    return hashlib.sha256(json.dumps([kind, source]).encode()).digest()
