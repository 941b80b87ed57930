"""Responses: what is read in them, and what is refused by name."""

import json
from typing import Any

import pytest

from services.agent.chat_requests import BadRequest, ChatAnswer, SessionMedia, StoredMessages
from services.agent.protocols.openai_responses import OPENAI_RESPONSES
from services.agent.protocols.protocol import read_object
from tests.kit.cases import each

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "name": "add", "parameters": {}, "strict": True, "description": None}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {}, "strict": True}}
CALL = {"type": "function_call", "call_id": "call00001", "name": "add", "arguments": '{"a":1}', "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "call00001", "output": "1"}
SAID = {"role": "assistant", "content": "So:"}
KNOWN = {"role": "tool", "content": "1", "tool_call_id": "call00001"}


def read(stored: StoredMessages | None = None, **asked: Any) -> Any:
    whole = {"model": "m", "input": "Hello", **asked}
    return OPENAI_RESPONSES.read(read_object(json.dumps(whole).encode()), stored or StoredMessages(), SessionMedia())


def call(name: str = "call00001") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_items_are_read_as_chat_templates_want_them() -> None:
    request = read(
        instructions="Be brief.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Now."}]},
            USER,
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", **SAID, "content": [{"type": "output_text", "text": "So:", "annotations": []}]},
            CALL,
            {**CALL, "call_id": "call00002"},
            RESULT,
            {**RESULT, "call_id": "call00002", "output": [{"type": "input_text", "text": "1"}]},
            CALL,
            RESULT,
        ],
        tools=[TOOL, {"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}],
        tool_choice="auto",
        max_output_tokens=7,
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["reasoning.encrypted_content"],
    )
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Now."},
        USER,
        {**SAID, "tool_calls": [call(), call("call00002")]},
        KNOWN,
        {**KNOWN, "tool_call_id": "call00002"},
        {"role": "assistant", "content": "", "tool_calls": [call()]},
        KNOWN,
    ]
    assert request.kept == request.messages[1:]  # a later request has instructions of its own
    assert (request.tools, request.calls, request.most, request.stop) == ([FUNCTION], True, 7, ())


def test_a_request_goes_on_from_a_stored_answer() -> None:
    stored = StoredMessages()
    first = read(stored, instructions="Be brief.", tools=[TOOL])
    said = {**SAID, "tool_calls": [call()]}
    stored.keep("x", [*first.kept, said], first.tools)
    second = read(stored, previous_response_id="resp_x", input=[RESULT], store=False)
    assert (second.messages, second.tools, second.kept) == ([USER, said, KNOWN], [FUNCTION], None)
    assert read(stored, previous_response_id="resp_x", input=[RESULT], tools=[]).tools == []
    stored.keep("y", json.loads(json.dumps([*second.messages, SAID])), second.tools)
    x, y = (stored.find("", f"resp_{name}", "resp_").messages for name in "xy")
    assert [one is other for one, other in zip(x, y, strict=False)] == [True, True]  # none is kept twice


@each(
    ("asked", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [USER, SAID]}, "input"),
        ({"input": ["Hello"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "1"}]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{**CALL, "arguments": "{"}, RESULT]}, "input[0]"),
        ({"input": [CALL, {**RESULT, "call_id": None}]}, "input[1]"),
        ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"previous_response_id": 3}, "previous_response_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**asked)
    error = OPENAI_RESPONSES.error(caught.value)["error"]
    assert (caught.value.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param.partition("[")[0] in error["message"]


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    answer = ChatAnswer({"role": "assistant", "content": "So"}, "", "length", 2, 3, "x")
    *_, last = OPENAI_RESPONSES.events(answer, {})
    assert last.startswith("event: response.incomplete\n")
    whole = json.loads(last.partition("data: ")[2])["response"]
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
