"""vLLM's protocol /inference/v1/generate: requests contain token ids instead of messages."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.agent.chat_requests import BadRequest, ChatAnswer, ChatRequest, SessionMedia, StoredMessages, shown
from services.agent.protocols.protocol import Protocol, Supported, check_supported, digest_of, positive, texts

SUPPORTED: Supported = {
    "stream": ((False, True), "use true or false"),
    "features": ((), "send media in messages"),
    "content_parts": ((), "send media in messages"),
    "kv_transfer_params": ((), "the run's engines keep their caches"),
}
SAMPLING = "sampling_params"
SUPPORTED_SAMPLING: Supported = {
    f"{SAMPLING}.n": ((1,), "ask once for each answer"),
    f"{SAMPLING}.logprobs": ((0, 1), "engines report the log-prob of the sampled token"),
    f"{SAMPLING}.prompt_logprobs": ((), "engines report the log-probs of sampled tokens"),
    f"{SAMPLING}.ignore_eos": ((False,), "the model ends its messages"),
    f"{SAMPLING}.logit_bias": (({},), "the run says how the model is sampled"),
    f"{SAMPLING}.allowed_token_ids": ((), "the run says how the model is sampled"),
    f"{SAMPLING}.bad_words": (([],), "the run says how the model is sampled"),
    f"{SAMPLING}.structured_outputs": ((), "ask for the format in the prompt"),
}


def read_request(asked: dict[str, Any], stored: StoredMessages, media: SessionMedia) -> ChatRequest:
    """Parse the JSON body of a request. Raises BadRequest, which names the unsupported parameter."""
    check_supported(asked, SUPPORTED)
    sampling = asked.get(SAMPLING, {})
    if not isinstance(sampling, dict):
        raise BadRequest(f"{SAMPLING} = {shown(sampling)} must be an object", SAMPLING)
    given = {f"{SAMPLING}.{name}": value for name, value in sampling.items() if value is not None}
    check_supported(given, SUPPORTED_SAMPLING)
    most, stop = f"{SAMPLING}.max_tokens", f"{SAMPLING}.stop"
    tokens = _token_ids("token_ids", asked.get("token_ids"))
    if not tokens:
        raise BadRequest("token_ids must have at least one token id", "token_ids")
    return ChatRequest(
        messages=[],
        tools=[],
        calls=True,
        most=positive(most, given[most]) if most in given else None,
        stop=texts(stop, given.get(stop, [])),
        digest=digest_of(asked),
        with_ids=True,
        tokens=tokens,
        stop_tokens=_token_ids(f"{SAMPLING}.stop_token_ids", given.get(f"{SAMPLING}.stop_token_ids", [])),
    )


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise BadRequest(f"{name} = {shown(value)} must be a list of token ids", name)
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise BadRequest(f"{name}[{index}] = {shown(token)} must be a token id", f"{name}[{index}]")
    return value


def whole(answer: ChatAnswer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON body of the whole answer."""
    assert answer.ids is not None  # requests ask for them
    pairs = zip(answer.ids.tokens, answer.ids.logprobs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in pairs
    ]
    choice = {
        "index": 0,
        "token_ids": list(answer.ids.tokens),
        "logprobs": {"content": content},
        "finish_reason": "length" if answer.finish_reason == "length" else "stop",
    }
    return {"request_id": f"gen-{answer.id}", "choices": [choice], "usage": answer.usage}


def events(answer: ChatAnswer, asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield the whole answer as one server-sent event, followed by the end marker "[DONE]"."""
    yield f"data: {json.dumps(whole(answer, asked))}\n\n"
    yield "data: [DONE]\n\n"


TOKEN_GENERATION = Protocol(read_request, whole, events)
