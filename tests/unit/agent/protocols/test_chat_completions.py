"""Chat completions and requests for tokens: what is read in them, and what is refused by name."""

import json
from typing import Any

import pytest

from relaxd.envs.environment import ToolCall
from relaxd.envs.replies import ParsedReply
from services.agent.chat_requests import AnswerIds, BadRequest, ChatAnswer, SessionMedia, StoredMessages, answer_message
from services.agent.protocols.chat_completions import CHAT_COMPLETIONS, read_tokenize_request
from services.agent.protocols.protocol import read_object
from tests.kit.cases import each

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def call(arguments: str = '{"a":1}', name: str = "call00001") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}


def read(**asked: Any) -> Any:
    body = read_object(json.dumps({"messages": [USER], **asked}).encode())
    return CHAT_COMPLETIONS.read(body, StoredMessages(), SessionMedia())


def test_messages_are_read_as_chat_templates_want_them() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    request = read(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call()], "refusal": None},
            {"role": "tool", "tool_call_id": "call00001", "content": "1"},
        ],
        tools=[TOOL],
        tool_choice="none",
        temperature=0.3,
        seed=None,
        n=1,
        stop="x",
        max_tokens=7,
        response_format={"type": "text"},
        unknown=True,
    )
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call() | {"function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "call00001"},
    ]
    assert (request.most, request.stop, request.calls, request.tools) == (7, ("x",), False, [TOOL])
    assert request.digest != read(temperature=0.3).digest
    assert read(temperature=0.3).digest == read(temperature=0.3, stream=True).digest


@each(
    ("asked", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"tools": [{**TOOL, "type": "custom"}]}, "tools[0]"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"role": "function", "content": "1"}]}, "messages[0]"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [USER, {"role": "tool", "content": "1"}]}, "messages[1]"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [call("{")]}, USER]}, "messages[0].tool_calls[0]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**asked)
    error = CHAT_COMPLETIONS.error(caught.value)["error"]
    assert (caught.value.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param.partition("[")[0].partition(".")[0] in error["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="body"):
        read_object(body)


def test_calls_that_cannot_be_read_stay_in_the_text() -> None:
    broken = ParsedReply("Now", problem="a tool call has no name")
    assert answer_message(broken, "Now <tool_call>{}</tool_call>")["content"] == "Now <tool_call>{}</tool_call>"
    some = ParsedReply("Now", "hm", (ToolCall("add", {"a": 1}, id="call00001"),), "a tool call has no name")
    answer = ChatAnswer(answer_message(some, "Now ..."), some.thinking, "tool_calls", 2, 3, "x", 0)
    events = "".join(CHAT_COMPLETIONS.events(answer, {"stream_options": {"include_usage": True}})).split("\n\n")
    assert events[3:] == ["data: [DONE]", ""]
    first, last, usage = (json.loads(event.removeprefix("data: ")) for event in events[:3])
    assert first["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "Now",
        "reasoning_content": "hm",
        "tool_calls": [call('{"a": 1}') | {"index": 0}],
    }
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls", "logprobs": None}
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


IDS = AnswerIds([1, 2], [5, 3], [-0.5, -0.25], ["Hi", "<|im_end|>"])


@pytest.mark.parametrize(
    ("asked", "tokens", "ids"),
    [
        ({}, None, None),
        ({"logprobs": True}, ["Hi", "<|im_end|>"], None),
        ({"logprobs": True, "return_tokens_as_token_ids": True}, ["token_id:5", "token_id:3"], None),
        ({"return_token_ids": True}, None, [5, 3]),
    ],
)
def test_token_ids_and_logprobs_come_if_they_are_asked_for(asked: dict[str, Any], tokens: Any, ids: Any) -> None:
    assert read(**asked).with_ids == bool(asked)
    answer = ChatAnswer({"role": "assistant", "content": "Hi"}, "", "stop", 2, 2, "x", ids=IDS if asked else None)
    whole = CHAT_COMPLETIONS.whole(answer, asked)
    first = json.loads(next(iter(CHAT_COMPLETIONS.events(answer, asked))).removeprefix("data: "))
    for body in (whole, first):
        choice = body["choices"][0]
        content = choice["logprobs"] and choice["logprobs"]["content"]
        assert (content and [one["token"] for one in content]) == tokens
        assert (content and [one["logprob"] for one in content]) == (tokens and [-0.5, -0.25])
        assert choice.get("token_ids") == ids
        assert body.get("prompt_token_ids") == (ids and [1, 2])


def test_texts_and_messages_to_tokenize_are_read() -> None:
    assert read_tokenize_request({"prompt": "Hello", "add_special_tokens": True}, SessionMedia()) == "Hello"
    request = read_tokenize_request({"messages": [USER], "add_generation_prompt": True}, SessionMedia())
    assert request.messages == [USER]


@each(
    ("asked", "param"),
    [
        ({}, "messages"),
        ({"prompt": ["Hello"]}, "prompt"),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi"}]}, "messages"),
        ({"prompt": "Hello", "return_token_strs": True}, "return_token_strs"),
    ],
)
def test_what_is_not_supported_in_requests_for_tokens_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match=param) as caught:
        read_tokenize_request(asked, SessionMedia())
    assert caught.value.param == param
