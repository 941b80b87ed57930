"""Histories of requests: what they add to the known one, and where they differ."""

import json
from typing import Any

import pytest

from relaxd.data.examples import Message
from services.agent.chat_requests import BadRequest, SessionMedia, StoredMessages, new_messages
from services.agent.protocols.chat_completions import CHAT_COMPLETIONS
from services.agent.protocols.protocol import read_object

USER = {"role": "user", "content": "Hello"}


def call(arguments: str = '{"a":1}', name: str = "call00001") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}


def read(*messages: Any, **more: Any) -> Any:
    return CHAT_COMPLETIONS.read(
        read_object(json.dumps({"messages": messages or [USER], **more}).encode()), StoredMessages(), SessionMedia()
    )


KNOWN: list[Message] = [
    USER,
    {
        "role": "assistant",
        "content": "So: ",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
]
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "1"}
SAID = {"role": "assistant", "content": "\nSo:", "tool_calls": [call('{ "a": 1.0}')]}


def test_new_messages_follow_the_models_own_however_it_is_spelt() -> None:
    request = read(USER, SAID | {"reasoning_content": "dropped or not"}, RESULT, USER)
    assert new_messages(KNOWN, request.messages) == [RESULT | {"name": "add"}, USER]


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([USER | {"content": "Hello!"}, SAID, RESULT], r"messages\[0\] isn't as it was: from character 5 on"),
        ([USER, SAID | {"content": "No:"}, RESULT], r"messages\[1\] isn't as it was: from character 0 on"),
        (
            [USER, SAID | {"tool_calls": [call('{"a":2}')]}, RESULT],
            r"messages\[1\] isn't as it was: its tool_calls are",
        ),
        ([USER, SAID | {"tool_calls": [call(name="other")]}, RESULT], r"messages\[1\] isn't as it was: its tool_calls"),
        ([USER, USER], r"messages\[1\] isn't as it was: its role is user, and was assistant"),
        ([USER], r"messages end before messages\[1\]"),
        ([USER, SAID, SAID, RESULT], r"messages\[2\] is the assistant's"),
    ],
)
def test_other_histories_are_refused_where_they_differ(messages: list[Any], where: str) -> None:
    with pytest.raises(BadRequest, match=where) as caught:
        new_messages(KNOWN, read(*messages).messages)
    assert caught.value.code == "history_changed"
