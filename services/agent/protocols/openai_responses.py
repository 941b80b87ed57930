"""OpenAI's Responses protocol."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from relaxd.data.examples import Message
from relaxd.media.placeholders import AUDIO, IMAGE
from services.agent.chat_requests import (
    BadRequest,
    ChatAnswer,
    ChatRequest,
    SessionMedia,
    Stored,
    StoredMessages,
    shown,
)
from services.agent.protocols.chat_completions import ROLES
from services.agent.protocols.protocol import (
    Parts,
    Protocol,
    Supported,
    call_of,
    check_supported,
    input_audio,
    model_of,
    named_events,
    read_content,
    read_functions,
    read_list,
    request_of,
)

SUPPORTED: Supported = {
    "tool_choice": (("auto", "none"), 'use "auto" or "none"'),
    "parallel_tool_calls": ((True,), "the model may write several calls"),
    "background": ((False,), "wait for the answer"),
    "conversation": ((), "use previous_response_id, or send all items"),
    "prompt": ((), "send instructions and input"),
    "truncation": (("disabled",), "send the items that fit"),
    "context_management": (([],), "send the items that fit"),
    "top_logprobs": ((0,), "relaxd keeps the log-probs"),
}
IGNORED_TOOLS = ("namespace", "web_search", "web_search_preview")
"""Types of tools that some programs offer to every model. They are ignored."""
PARTS = Parts(
    ("input_text", "output_text", "text"),
    {"input_image": (IMAGE, lambda part: part.get("image_url")), "input_audio": (AUDIO, input_audio)},
)
"""Supported content parts: text, images and sounds."""


def read_request(asked: dict[str, Any], stored: StoredMessages, media: SessionMedia) -> ChatRequest:
    """Parse the JSON body of a request. Raises BadRequest, which names the unsupported parameter."""
    check_supported(asked, SUPPORTED)
    text = asked.get("text")
    if isinstance(text, dict) and text.get("format") not in (None, {"type": "text"}):
        raise BadRequest("text.format isn't supported: ask for the format in the input", "text")
    include = asked.get("include")
    if isinstance(include, list) and "message.output_text.logprobs" in include:
        raise BadRequest(
            "include = message.output_text.logprobs isn't supported: relaxd keeps the log-probs", "include"
        )
    before = Stored()
    if (previous := asked.get("previous_response_id")) is not None:
        before = stored.find("previous_response_id", previous, "resp_")
    tools = _tools(asked["tools"]) if "tools" in asked else list(before.tools)
    kept = [*before.messages, *_items(asked, media)]
    messages = list(kept)
    if instructions := read_content("instructions", asked.get("instructions"), PARTS):
        messages.insert(0, {"role": "system", "content": instructions})
    return request_of(
        asked,
        messages,
        tools,
        calls=asked.get("tool_choice") != "none",
        most=("max_output_tokens",),
        place="input",
        kept=kept if asked.get("store") is not False else None,
    )


def _tools(tools: Any) -> list[dict[str, Any]]:
    found = []
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            function = {name: value for name, value in tool.items() if name != "type" and value is not None}
            found.append({"type": "function", "function": function})
        elif kind not in IGNORED_TOOLS:
            raise BadRequest(f"tools[{index}] = {shown(tool)} isn't supported: use functions", f"tools[{index}]")
    return read_functions(found)


def _items(asked: Mapping[str, Any], media: SessionMedia) -> list[Message]:
    """Convert a request's input to messages. An assistant's message and the tool calls after it become one message."""
    given = asked.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for index, item in enumerate(read_list(asked, "input")):
        place = f"input[{index}]"
        match item.get("type", "message") if isinstance(item, dict) else None:
            case "message" if item.get("role") in ROLES and item["role"] != "tool" and item.get("content") is not None:
                role = ROLES[item["role"]]
                shows = media if role != "assistant" else None
                content = read_content(f"{place}.content", item["content"], PARTS, shows)
                messages.append({"role": role, "content": content})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(_call(place, item))
            case "function_call_output":
                messages.append(_result(place, item, media))
            case "reasoning":
                pass  # the tokens have it
            case _:
                raise BadRequest(
                    f"{place} = {shown(item)} isn't supported: it must be a message with role and content, a "
                    "function_call, a function_call_output or reasoning",
                    place,
                )
    return messages


def _call(place: str, item: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return call_of(item.get("name"), item.get("arguments"), item.get("call_id"))
    except ValueError as error:
        raise BadRequest(
            f"{place} = {shown(item)} must have a call_id, a name, and arguments that are an object as JSON text", place
        ) from error


def _result(place: str, item: Mapping[str, Any], media: SessionMedia) -> Message:
    if not isinstance(item.get("call_id"), str) or item.get("output") is None:
        raise BadRequest(f"{place} = {shown(item)} must have a call_id and an output", place)
    content = read_content(f"{place}.output", item["output"], PARTS, media)
    return {"role": "tool", "content": content, "tool_call_id": item["call_id"]}


def response(answer: ChatAnswer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON body of the whole answer: one response."""
    cut = answer.finish_reason == "length"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": model_of(asked),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": _output(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "instructions": asked.get("instructions"),
        "previous_response_id": asked.get("previous_response_id"),
        "tools": asked.get("tools", []),
        "tool_choice": asked.get("tool_choice", "auto"),
        "parallel_tool_calls": True,
        "metadata": asked.get("metadata", {}),
        "text": {"format": {"type": "text"}},
    }


def _output(answer: ChatAnswer) -> list[dict[str, Any]]:
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    calls = answer.message.get("tool_calls", [])
    items: list[dict[str, Any]] = []
    if answer.thinking:
        thinking = {"type": "reasoning_text", "text": answer.thinking}
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [thinking]})
    if answer.message["content"] or not calls:
        text = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status, "content": [text]}
        items.append(item)
    for index, call in enumerate(calls):
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{answer.id}_{index}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": json.dumps(function["arguments"]),
                "status": status,
            }
        )
    return items


def events(answer: ChatAnswer, asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as server-sent events, for a streaming request."""
    whole = response(answer, asked)
    numbered = ({**event, "sequence_number": number} for number, event in enumerate(_events(whole)))
    return named_events(numbered)


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {**item, "status": "in_progress"}
        if item["type"] == "function_call":
            begin, pieces = {**empty, "arguments": ""}, _argument_events(item)
        else:
            begin, pieces = {**empty, "content": []}, _part_events(item["content"][0])
        yield {"type": "response.output_item.added", "output_index": index, "item": begin}
        yield from ({**piece, **place} for piece in pieces)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _argument_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind, arguments = "response.function_call_arguments", item["arguments"]
    yield {"type": f"{kind}.delta", "delta": arguments}
    yield {"type": f"{kind}.done", "arguments": arguments, "name": item["name"]}


def _part_events(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind, place = f"response.{part['type']}", {"content_index": 0}
    logprobs: dict[str, list[Any]] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": f"{kind}.delta", **place, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


OPENAI_RESPONSES = Protocol(read_request, response, events)
