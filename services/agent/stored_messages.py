"""Messages that the endpoint stores for programs that send only new ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relaxd.data.examples import Message
from services.agent.chat_requests import BadRequest


@dataclass(frozen=True)
class Stored:
    """A conversation up to an answer, its last message."""

    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    """Schemas of the tools that the request had."""


class StoredMessages:
    """The messages of one session, by the ids of its answers."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}

    def keep(self, name: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Store the messages up to an answer. Messages shared with another answer are stored once."""
        last = next(reversed(self._stored.values()), Stored())
        known = [
            old if old == new else new for old, new in zip(last.messages, messages, strict=False)
        ]  # each request was read anew, so that equal messages aren't the same objects
        shared = last.tools if last.tools == tools else tools
        self._stored[name] = Stored([*known, *messages[len(known) :]], shared)

    def find(self, param: str, name: Any, prefix: str) -> Stored:
        """Return the messages up to an answer, given its id with the protocol's prefix. Raises BadRequest."""
        found = self._stored.get(name.removeprefix(prefix)) if isinstance(name, str) else None
        if found is None:
            raise BadRequest(f'{param} = "{name}" isn\'t an answer that was stored in this session', param)
        return found
