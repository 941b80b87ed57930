"""OpenAI's Chat Completions protocol, and vLLM's requests to tokenise messages."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from relaxd.data.examples import Message
from relaxd.media.placeholders import PARTS as MEDIA_PARTS
from services.agent.chat_requests import BadRequest, ChatAnswer, ChatRequest, SessionMedia, StoredMessages, shown
from services.agent.protocols.protocol import (
    Parts,
    Protocol,
    Supported,
    call_of,
    check_supported,
    input_audio,
    model_of,
    read_content,
    read_functions,
    read_list,
    request_of,
)

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of messages in requests, with their names in chat templates."""
SUPPORTED: Supported = {
    "n": ((1,), "ask once for each answer"),
    "tool_choice": (("auto", "none"), 'use "auto" or "none"'),
    "parallel_tool_calls": ((True,), "the model may write several calls"),
    "response_format": (({"type": "text"},), "ask for the format in a message"),
    "logprobs": ((False, True), "use true or false"),
    "top_logprobs": ((0,), "engines report the log-prob of the sampled token"),
    "logit_bias": (({},), "the run says how the model is sampled"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tools and tool_choice"),
    "modalities": ((["text"],), "the model writes text"),
    "audio": ((), "the model writes text"),
    "web_search_options": ((), "give the model a tool"),
    "return_token_ids": ((False, True), "use true or false"),
    "return_tokens_as_token_ids": ((False, True), "use true or false"),
}
TOKENIZE_SUPPORTED: Supported = {
    "add_generation_prompt": ((True,), "messages are tokenised as the model gets them"),
    "continue_final_message": ((False,), "messages are tokenised as the model gets them"),
    "return_token_strs": ((False,), "use the model's tokenizer"),
    "chat_template": ((), "model.chat_template of the run is used"),
}


def _source(part: Mapping[str, Any]) -> Any:
    name = part["type"]
    if name == "input_audio":
        return input_audio(part)
    inside, source = MEDIA_PARTS[name][1], part.get(name)
    return source.get(inside) if inside and isinstance(source, dict) else source


PARTS = Parts(("text",), {name: (kind, _source) for name, (kind, _) in MEDIA_PARTS.items()})
"""Supported content parts: text and media. Media may also have the form that relaxd's environments use."""


def read_request(asked: dict[str, Any], stored: StoredMessages, media: SessionMedia) -> ChatRequest:
    """Parse the JSON body of a request. Raises BadRequest, which names the unsupported parameter."""
    check_supported(asked, SUPPORTED)
    messages = [_message(f"messages[{index}]", one, media) for index, one in enumerate(read_list(asked, "messages"))]
    request = request_of(
        asked,
        messages,
        read_functions(asked.get("tools", [])),
        calls=asked.get("tool_choice") != "none",
        most=("max_completion_tokens", "max_tokens"),
        stop="stop",
    )
    return replace(request, with_ids=asked.get("logprobs") is True or asked.get("return_token_ids") is True)


def read_tokenize_request(asked: dict[str, Any], media: SessionMedia) -> ChatRequest | str:
    """Parse vLLM's request to tokenise messages and tools, or a text. Raises BadRequest."""
    check_supported(asked, TOKENIZE_SUPPORTED)
    if "prompt" not in asked:
        return read_request(asked, StoredMessages(), media)
    if not isinstance(asked["prompt"], str):
        raise BadRequest(f"prompt = {shown(asked['prompt'])} must be a text", "prompt")
    return asked["prompt"]


def _message(place: str, message: Any, media: SessionMedia) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadRequest(f"{place} = {shown(message)} must be a message of one of the roles {', '.join(ROLES)}", place)
    role = ROLES[message["role"]]
    shows = media if role != "assistant" else None
    content = read_content(f"{place}.content", message.get("content"), PARTS, shows)
    read: Message = {"role": role, "content": content}
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = _calls(place, message["tool_calls"])
    elif message.get("content") is None and role != "assistant":
        raise BadRequest(f"{place}.content is missing", f"{place}.content")
    if role == "tool":
        read["tool_call_id"] = message.get("tool_call_id")
        if not isinstance(read["tool_call_id"], str):
            raise BadRequest(f"{place}.tool_call_id is missing: it says which call is answered", place)
    if isinstance(message.get("name"), str) and role != "assistant":
        read["name"] = message["name"]
    return read


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    read = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        try:
            function = call["function"]
            read.append(call_of(function["name"], function["arguments"], call["id"]))
        except (TypeError, KeyError, ValueError) as error:
            raise BadRequest(
                f"{place}.tool_calls[{index}] = {shown(call)} must have an id, and a function with a name and with "
                "arguments that are an object as JSON text",
                f"{place}.tool_calls[{index}]",
            ) from error
    return read


def completion(answer: ChatAnswer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON body of an answer that isn't streamed."""
    choice = {"index": 0, "message": _wire(answer), "finish_reason": answer.finish_reason, **_ids(answer, asked)}
    whole = {**_head("chat.completion", answer, asked), "choices": [choice], "usage": answer.usage}
    return whole | _prompt_ids(answer, asked)


def events(answer: ChatAnswer, asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as server-sent events, for a streaming request."""
    delta = _wire(answer)
    for index, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = index
    head, options = _head("chat.completion.chunk", answer, asked), asked.get("stream_options")
    first = {"index": 0, "delta": delta, "finish_reason": None, **_ids(answer, asked)}
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": None}
    chunks = [{**head, "choices": [first], **_prompt_ids(answer, asked)}, {**head, "choices": [last]}]
    if isinstance(options, dict) and options.get("include_usage") is True:
        chunks.append({**head, "choices": [], "usage": answer.usage})
    yield from (f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    yield "data: [DONE]\n\n"


def _head(kind: str, answer: ChatAnswer, asked: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": model_of(asked)}


def _ids(answer: ChatAnswer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a completion's choice with log-probs and token ids, in vLLM's form."""
    fields: dict[str, Any] = {"logprobs": None}
    if answer.ids and asked.get("logprobs"):
        numbered = [f"token_id:{token}" for token in answer.ids.tokens]
        texts = numbered if asked.get("return_tokens_as_token_ids") else answer.ids.texts
        pairs = zip(texts, answer.ids.logprobs, strict=True)
        empty: dict[str, Any] = {"bytes": None, "top_logprobs": []}
        fields["logprobs"] = {"content": [{"token": text, "logprob": logprob, **empty} for text, logprob in pairs]}
    if answer.ids and asked.get("return_token_ids"):
        fields["token_ids"] = list(answer.ids.tokens)
    return fields


def _prompt_ids(answer: ChatAnswer, asked: Mapping[str, Any]) -> dict[str, list[int]]:
    if answer.ids and asked.get("return_token_ids"):
        return {"prompt_token_ids": list(answer.ids.prompt)}
    return {}


def _wire(answer: ChatAnswer) -> dict[str, Any]:
    """Convert an answer to an assistant message in OpenAI's form."""
    calls = answer.message.get("tool_calls")
    wire: dict[str, Any] = {"role": "assistant", "content": answer.message["content"] or (None if calls else "")}
    if answer.thinking:
        wire["reasoning_content"] = answer.thinking
    if calls:
        wire["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return wire


CHAT_COMPLETIONS = Protocol(read_request, completion, events)
