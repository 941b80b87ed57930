"""Judges: `await judge.ask(...)` for rewards of your own, and the bundled rewards that use it.

The service, which has the judge's address and credentials, forwards the questions.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

from relaxd.media.messages import to_proto
from relaxd.media.placeholders import KINDS
from relaxd.v1.judge_pb2 import AskRequest, AskResponse

__all__ = ["JudgeError", "NoJudgeError", "UnreadableReplyError", "ask"]

T = TypeVar("T")
Messages = str | Sequence[Mapping[str, Any]]
"""The user's message, or chat messages {"role": ..., "content": text}. If the judge is at an address, the content may
also be a list of parts: {"type": "text", "text": ...} and {"type": "image", "uri": data URI}, or OpenAI's form {"type":
"image_url", "image_url": {"url": data URI}}."""
FORMS = (
    '{"type": "text", "text": ...}, {"type": "image", "uri": a data URI} or '
    '{"type": "image_url", "image_url": {"url": ...}}'
)
"""The valid forms of a message's content parts, as error messages show them."""
SHOWN = 200
"""Maximum number of characters that error messages show of a judge's unreadable reply."""


class JudgeError(Exception):
    """The judge gave no usable reply."""


class NoJudgeError(JudgeError):
    """A reward asks the judge, but the run has none."""


class UnreadableReplyError(JudgeError):
    """All of the judge's replies to a question were invalid, after the permitted retries."""


class Line(Protocol):
    """The connection over which this process asks the judge."""

    async def ask(self, question: AskRequest) -> AskResponse:
        """Send a question to the judge, and return the judge's reply. Raises JudgeError."""

    def count_unreadable(self) -> None:
        """Add 1 to the count of judge replies that could not be parsed."""


_line: Line | None = None


def connect(line: Line | None) -> None:
    """Set the connection that `ask` uses in this process; None removes it."""
    global _line
    _line = line


@overload
async def ask(messages: Messages, *, read: None = None, retries: int = 2, seed: int = 0) -> str: ...
@overload
async def ask(messages: Messages, *, read: Callable[[str], T], retries: int = 2, seed: int = 0) -> T: ...
async def ask(messages: Messages, *, read: Callable[[str], Any] | None = None, retries: int = 2, seed: int = 0) -> Any:
    """Ask the judge, and wait for its reply; the time doesn't count in reward.timeout_seconds.

    Args:
        messages: the user's message, or a conversation.
        read: parses a reply, and raises ValueError for an invalid reply; the request is then repeated with another
            seed. Without it, the reply's text is returned.
        retries: maximum number of further requests.
        seed: number of the vote, if the same question gets several votes.

    Returns the result of `read`. Raises NoJudgeError, UnreadableReplyError, or another JudgeError: the judge refuses
    the question, takes too long or is away for too long, or a message has a wrong form.
    """
    if _line is None:
        raise NoJudgeError("there is no judge here: the reward service asks it, in a run with roles.judge.model")
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else _with_uris(messages)
    problem = ""
    for attempt in range(retries + 1):
        question = AskRequest(messages=to_proto(chat), seed=_seed(chat, seed, attempt))
        text = (await _line.ask(question)).text
        if read is None:
            return text
        try:
            return read(text)
        except ValueError as error:
            _line.count_unreadable()
            problem = f"{error}; the reply: {_shortened(text)!r}"
    times = f"{retries + 1} replies" if retries else "the reply"
    raise UnreadableReplyError(f"{times} of the judge could not be read: {problem}")


def _with_uris(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with OpenAI's image parts converted to {"type": "image", "uri": ...}. Raises JudgeError for a
    wrong form."""
    chat: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not isinstance(content, str | list | tuple | None):
            form = '{"role": "user", "content": a text or a list of parts}'
            raise JudgeError(f"messages[{number}] of the question to the judge must look like {form}")
        if isinstance(content, list | tuple):
            content = [_with_uri(part, f"messages[{number}].content[{place}]") for place, part in enumerate(content)]
        chat.append({**message, "content": content})
    return chat


def _with_uri(part: Any, place: str) -> Mapping[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part
    uri = part.get("uri") if kind in KINDS else None
    if kind == "image_url":
        found = part.get("image_url")
        uri = found.get("url") if isinstance(found, Mapping) else found
    if not isinstance(uri, str):
        what = f"has the type {kind!r}" if isinstance(kind, str) else "is no part"
        raise JudgeError(
            f"{place} of the question to the judge {what}, or lacks what belongs to it: it must be {FORMS}"
        )
    return {"type": "image", "uri": uri} if kind == "image_url" else part


def _seed(chat: Sequence[Mapping[str, Any]], seed: int, attempt: int) -> int:
    """Return the sampling seed of a judge request: a hash of the arguments, so a repeated run sends the same seeds."""
    text = json.dumps([chat, seed, attempt], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 33


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else "…" + line[-SHOWN + 1 :]
