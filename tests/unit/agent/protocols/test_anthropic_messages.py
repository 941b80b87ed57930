"""Anthropic's messages: what is read in them, and what is refused by name."""

import json
from typing import Any

import pytest

from services.agent.chat_requests import BadRequest, ChatAnswer, SessionMedia, StoredMessages
from services.agent.protocols.anthropic_messages import ANTHROPIC_MESSAGES
from services.agent.protocols.protocol import read_object
from tests.kit.cases import each

USER = {"role": "user", "content": "Hello"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "call00001", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call00001", "content": [{"type": "text", "text": "1"}]}


def read(stored: StoredMessages | None = None, **asked: Any) -> Any:
    whole = {"model": "m", "max_tokens": 7, "messages": [USER], **asked}
    return ANTHROPIC_MESSAGES.read(read_object(json.dumps(whole).encode()), stored or StoredMessages(), SessionMedia())


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}


def test_messages_are_read_as_chat_templates_want_them() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    request = read(
        system=[text("Be "), text("brief.")],
        messages=[
            {"role": "user", "content": [text("Hel"), text("lo")]},
            {"role": "assistant", "content": [thinking, text("So:"), USE, {**USE, "id": "call00002"}]},
            {
                "role": "user",
                "content": [RESULT, {**RESULT, "tool_use_id": "call00002", "content": "2"}, text("Go on.")],
            },
        ],
        tools=[TOOL, {"type": "custom", "name": "stop"}],
        tool_choice={"type": "none"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["x"],
        metadata=None,
    )
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "So:", "tool_calls": [call, {**call, "id": "call00002"}]},
        {"role": "tool", "content": "1", "tool_call_id": "call00001"},
        {"role": "tool", "content": "2", "tool_call_id": "call00002"},
        {"role": "user", "content": "Go on."},
    ]
    functions = [
        {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        {"name": "stop", "parameters": {}},
    ]
    assert request.tools == [{"type": "function", "function": function} for function in functions]
    assert (request.most, request.stop, request.calls) == (7, ("x",), False)


def test_a_thread_goes_on_from_a_stored_answer() -> None:
    stored = StoredMessages()
    first = read(stored, system="Be brief.", tools=[TOOL], thread={"type": "create"})
    assert read(tools=[TOOL]).kept is None
    said = {"role": "assistant", "content": "Hi"}
    stored.keep("x", [*first.kept, said], first.tools)
    second = read(stored, thread={"type": "continue", "previous_message_id": "msg_x"})
    assert second.messages == second.kept == [{"role": "system", "content": "Be brief."}, USER, said, USER]
    assert second.tools == first.tools


@each(
    ("asked", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "tool_use_id": None}]}]}, "messages[0].content[0]"),
        ({"messages": [USER, {"role": "assistant", "content": [{**USE, "input": "{"}]}]}, "messages[1].content[0]"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is ("}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": ["add"]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread.previous_message_id"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}, "system": "Hi"}, "system"),
        ({"thread": "new"}, "thread"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**asked)
    assert (caught.value.status, caught.value.param) == (400, param)
    error = ANTHROPIC_MESSAGES.error(caught.value)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert param.partition("[")[0].partition(".")[0] in error["error"]["message"]


@pytest.mark.parametrize(("thinking", "shown"), [({"type": "enabled"}, True), ({"type": "disabled"}, False)])
def test_thinking_comes_if_the_request_asks_for_it(thinking: dict[str, Any], shown: bool) -> None:
    answer = ChatAnswer({"role": "assistant", "content": "5"}, "hm", "length", 2, 3, "x")
    whole = ANTHROPIC_MESSAGES.whole(answer, {"thinking": thinking})
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "x"}] * shown + [{"type": "text", "text": "5"}]
    assert (whole["content"], whole["stop_reason"]) == (blocks, "max_tokens")
