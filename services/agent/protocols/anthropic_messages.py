"""Anthropic's Messages protocol."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from relaxd.data.examples import Message
from relaxd.media.placeholders import IMAGE
from services.agent.chat_requests import (
    BadRequest,
    ChatAnswer,
    ChatRequest,
    SessionMedia,
    Stored,
    StoredMessages,
    joined,
    shown,
)
from services.agent.protocols.protocol import (
    Parts,
    Protocol,
    Supported,
    call_of,
    check_supported,
    model_of,
    named_events,
    read_content,
    read_functions,
    read_list,
    read_part,
    request_of,
)

ROLES = ("user", "assistant", "system")
"""Roles that messages of a request may have."""
SUPPORTED: Supported = {
    "output_format": ((), "ask for the format in a message"),
    "mcp_servers": (([],), "give the model tools"),
    "container": ((), "the model writes text"),
}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
"""Anthropic's error types by HTTP status."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _image(part: Mapping[str, Any]) -> Any:
    source = part.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        return None
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


PARTS = Parts(("text",), {"image": (IMAGE, _image)})
"""Supported content blocks: text and images."""


def read_request(asked: dict[str, Any], stored: StoredMessages, media: SessionMedia) -> ChatRequest:
    """Parse the JSON body of a request. Raises BadRequest, which names the unsupported parameter."""
    check_supported(asked, SUPPORTED)
    output = asked.get("output_config")
    if isinstance(output, dict) and output.get("format") is not None:
        raise BadRequest("output_config.format isn't supported: ask for the format in a message", "output_config")
    before = _thread(asked, stored)
    messages = list(before.messages)
    if system := read_content("system", asked.get("system"), PARTS):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(read_list(asked, "messages")):
        messages += _messages(f"messages[{index}]", message, media)
    return request_of(
        asked,
        messages,
        _tools(asked["tools"]) if "tools" in asked else list(before.tools),
        calls=_tool_choice(asked.get("tool_choice", {"type": "auto"})) != "none",
        most=("max_tokens",),
        stop="stop_sequences",
        kept=messages if "thread" in asked else None,
    )


def _thread(asked: Mapping[str, Any], stored: StoredMessages) -> Stored:
    """Return the stored conversation that a request continues; an empty one for a new thread. Raises BadRequest."""
    thread = asked.get("thread", {"type": "create"})
    match thread.get("type") if isinstance(thread, dict) else None:
        case "create":
            return Stored()
        case "continue" if "system" not in asked:
            return stored.find("thread.previous_message_id", thread.get("previous_message_id"), "msg_")
        case "continue":
            raise BadRequest("system can't change in a thread: leave it out", "system")
    raise BadRequest(f'thread = {shown(thread)} must have the type "create" or "continue"', "thread")


def _tool_choice(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "none"):
        raise BadRequest(f'tool_choice = {shown(choice)} isn\'t supported: use type "auto" or "none"', "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        raise BadRequest(
            "tool_choice.disable_parallel_tool_use = true isn't supported: the model may write several calls",
            "tool_choice",
        )
    return str(kind)


def _tools(tools: Any) -> list[dict[str, Any]]:
    found = []
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise BadRequest(f"tools[{index}].type = {shown(kind)} isn't supported: use custom ones", f"tools[{index}]")
        function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
        found.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}})
    return read_functions(found)


def _messages(place: str, message: Any, media: SessionMedia) -> Iterator[Message]:
    """Convert a message to the form of chat templates. Each tool result becomes a separate message."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise BadRequest(f"{place} = {shown(message)} must be a message of one of the roles {', '.join(ROLES)}", place)
    content = message.get("content")
    if content is None:
        raise BadRequest(f"{place}.content is missing", f"{place}.content")
    blocks = content
    if not isinstance(content, list):
        blocks = [{"type": "text", "text": read_content(f"{place}.content", content, PARTS)}]
    parts: list[dict[str, Any]] = []
    calls = []
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        match (role, block.get("type") if isinstance(block, dict) else None):
            case "assistant", "thinking" | "redacted_thinking":
                pass  # the tokens have it
            case "assistant", "tool_use":
                calls.append(_call(where, block))
            case "user", "tool_result":
                if parts:
                    yield {"role": role, "content": joined(parts)}
                    parts = []
                yield _result(where, block, media)
            case _:
                parts.append(read_part(where, block, PARTS, media if role != "assistant" else None))
    if role == "assistant":
        yield {"role": role, "content": joined(parts), **({"tool_calls": calls} if calls else {})}
    elif parts or not blocks:
        yield {"role": role, "content": joined(parts)}


def _call(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return call_of(block.get("name"), block.get("input"), block.get("id"))
    except ValueError as error:
        raise BadRequest(
            f"{place} = {shown(block)} must have an id, a name, and an input that is an object", place
        ) from error


def _result(place: str, block: Mapping[str, Any], media: SessionMedia) -> Message:
    if not isinstance(block.get("tool_use_id"), str):
        raise BadRequest(f"{place}.tool_use_id is missing: it says which call is answered", place)
    content = read_content(f"{place}.content", block.get("content"), PARTS, media)
    return {"role": "tool", "content": content, "tool_call_id": block["tool_use_id"]}


def _blocks(answer: ChatAnswer, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an answer's content blocks.

    Thinking is included only if requested, because some programs can't handle it.
    """
    calls = answer.message.get("tool_calls", [])
    wanted = asked.get("thinking")
    blocks: list[dict[str, Any]] = []
    if answer.thinking and isinstance(wanted, dict) and wanted.get("type") != "disabled":
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": answer.id})
    if answer.message["content"] or not calls:
        blocks.append({"type": "text", "text": answer.message["content"]})
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def message(answer: ChatAnswer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON body of the whole answer: one message."""
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": model_of(asked),
        "content": _blocks(answer, asked),
        "stop_reason": _STOP_REASONS[answer.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def events(answer: ChatAnswer, asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as server-sent events, for a streaming request."""
    return named_events(_events(message(answer, asked)))


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    usage, blocks = whole["usage"], whole["content"]
    begun = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    yield {"type": "ping"}
    for index, block in enumerate(blocks):
        match block["type"]:
            case "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            case "text":
                empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            case _:
                empty = {**block, "input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None},
        "usage": usage,
    }
    yield {"type": "message_stop"}


def error_body(error: BadRequest) -> dict[str, Any]:
    """Return the JSON body of an error answer in Anthropic's form."""
    kind = _ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


ANTHROPIC_MESSAGES = Protocol(read_request, message, events, error_body)
