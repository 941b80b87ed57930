"""`python programs.py WHAT`: programs of the tests, which a conversation starts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SAMPLE = json.loads(Path(os.environ["RELAXD_SAMPLE"]).read_text())
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def ask(messages: list[Any], key: str = os.environ["OPENAI_API_KEY"], **more: Any) -> Any:
    """Ask for a message without the client's package, whose import takes long. Exits with 9 when it is refused."""
    asked = {"model": "any", "messages": messages, **more}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked, key)["choices"][0]["message"]


def post(address: str, asked: dict[str, Any], key: str = os.environ["OPENAI_API_KEY"]) -> Any:
    """Send a request. Exits with 9 when it is refused."""
    request = urllib.request.Request(address, json.dumps(asked).encode(), {"x-api-key": key})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
        sys.exit(9)


def refusal(address: str, asked: dict[str, Any]) -> str:
    """Send a request that is refused; return the status and the parameter."""
    request = urllib.request.Request(address, json.dumps(asked).encode(), {"x-api-key": os.environ["OPENAI_API_KEY"]})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    return f"{refused.value.code} {json.load(refused.value)['error']['param']}"


async def loop() -> None:
    """Answer tool calls with the openai package until the model calls none. The first request is sent twice at once."""
    import openai

    client = openai.AsyncOpenAI(max_retries=0)
    assert [model.id for model in (await client.models.list()).data] == ["policy"]
    messages = [*SAMPLE["messages"]]
    first, again = await asyncio.gather(
        *(client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0) for _ in range(2))
    )
    assert first == again
    said = first.choices[0]
    assert said.finish_reason == "tool_calls"
    messages.append(said.message.model_dump(exclude_none=True))
    for call in said.message.tool_calls:
        total = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{total}<|im_end|>"})
    stream = await client.chat.completions.create(
        model="any",
        messages=messages,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    first, usage = chunks[0], chunks[-1].usage
    assert len(first.prompt_token_ids) == usage.prompt_tokens > 0
    assert len(first.choices[0].token_ids) == usage.completion_tokens > 0
    said_tokens = first.choices[0].logprobs.content
    assert "".join(one.token for one in said_tokens) == f"{text}<|im_end|>"
    assert [one.logprob for one in said_tokens] == [-float(one) for one in first.choices[0].token_ids]
    address = os.environ["ANTHROPIC_BASE_URL"] + "/tokenize"
    tokenized = post(address, {"model": "any", "messages": messages, "tools": TOOLS})
    assert tokenized["tokens"] == first.prompt_token_ids
    assert tokenized["count"] == usage.prompt_tokens
    assert post(address, {"prompt": "abc"})["count"] == 3
    model: Any = await client.models.retrieve("any")
    assert tokenized["max_model_len"] == model.max_model_len == 3000
    end(text, len(said.message.tool_calls))


async def messages() -> None:
    """Do the same with the anthropic package. The first request is sent twice at once, once of them streamed."""
    import anthropic

    client = anthropic.AsyncAnthropic(max_retries=0)
    function = TOOLS[0]["function"]
    asked: dict[str, Any] = {
        "model": "any",
        "max_tokens": 1000,
        "system": "Be brief.",
        "tools": [{"name": "add", "description": "Adds.", "input_schema": function["parameters"]}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "messages": SAMPLE["messages"],
    }

    async def streamed(**asked: Any) -> Any:
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    async def count() -> int:
        shared = {name: asked[name] for name in ("model", "system", "tools", "thinking", "messages")}
        return (await client.messages.count_tokens(**shared)).input_tokens

    counted = await count()
    first, again = await asyncio.gather(client.messages.create(**asked), streamed(**asked))
    assert counted == first.usage.input_tokens
    assert first.model_dump(exclude_none=True) == again.model_dump(exclude_none=True)
    assert (first.stop_reason, again.stop_reason) == ("tool_use", "tool_use")
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": f"{sum(use.input.values())}<|im_end|>"}
        for use in uses
    ]
    asked["messages"] = [*asked["messages"], first.to_param(), {"role": "user", "content": results}]
    last = await streamed(**asked)
    assert (last.stop_reason, [block.type for block in last.content]) == ("end_turn", ["text"])
    assert await count() == last.usage.input_tokens > last.usage.output_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        await client.messages.create(**asked | {"tool_choice": {"type": "any"}})
    end(last.content[0].text, len(uses))


def thread() -> None:
    """Do the same with Anthropic's tool runner, whose second request has only the results."""
    import anthropic

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds."""
        return f"{a + b}<|im_end|>"

    runner = anthropic.Anthropic(max_retries=0).beta.messages.tool_runner(
        model="any", max_tokens=1000, system="Be brief.", tools=[add], messages=SAMPLE["messages"]
    )
    end(runner.until_done().content[-1].text, 2)


async def responses() -> None:
    """Do the same with responses of the openai package: the second request has all items, the third what is new."""
    import openai

    client = openai.AsyncOpenAI(max_retries=0)
    asked: dict[str, Any] = {
        "model": "any",
        "instructions": "Be brief.",
        "tools": [{"type": "function", **TOOLS[0]["function"]}],
    }
    items: list[Any] = SAMPLE["messages"]

    async def streamed(**asked: Any) -> Any:
        async with client.responses.stream(**asked) as stream:
            return await stream.get_final_response()

    first, again = await asyncio.gather(client.responses.create(**asked, input=items), streamed(**asked, input=items))
    assert (first.id, first.status) == (again.id, again.status)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    for one, other in zip(first.output, again.output, strict=True):
        assert one.model_dump(exclude_none=True) == other.model_dump(exclude_none=True)
    calls = [item for item in first.output if item.type == "function_call"]
    for call in calls:
        total = sum(json.loads(call.arguments).values())
        items = [*items, {"type": "function_call_output", "call_id": call.call_id, "output": f"{total}<|im_end|>"}]
    items[1:1] = first.output
    second = await client.responses.create(**asked, input=items)
    assert second.usage.total_tokens > second.usage.output_tokens > 0
    asked["previous_response_id"] = second.id
    last = await streamed(**asked, input="Sure?")
    assert last.output_text == "Yes."
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(**asked | {"previous_response_id": "resp_none"}, input="And?")
    end(second.output_text, len(calls))


def end(text: str, calls: int) -> None:
    """Write the result: 1 for a text that has the answer."""
    result = {"reward": float(SAMPLE["answer"] in text), "info": {"calls": calls, "note": text}}
    Path(os.environ["RELAXD_RESULT"]).write_text(json.dumps(result))


Ask = Callable[[list[dict[str, Any]]], str]
"""Asks with messages in the form of chat completions; returns the answer."""


def chat_completions(answers: list[Any]) -> Ask:
    """Ask with the openai package; answers are kept in a list."""
    import openai

    client = openai.OpenAI(max_retries=0)

    def ask(messages: list[Any]) -> str:
        answer: Any = client.chat.completions.create(
            model="any", messages=messages, extra_body={"return_token_ids": True}
        )
        tokenized = post(os.environ["ANTHROPIC_BASE_URL"] + "/tokenize", {"messages": messages})
        assert tokenized["tokens"] == answer.prompt_token_ids
        answers.append(answer)
        return answer.choices[0].message.content or ""

    return ask


def with_parts(messages: list[dict[str, Any]], written: str, said: str, image: Callable[[str], Any]) -> list[Any]:
    """Return messages with parts of another protocol: types of texts, and the part of a data URI."""

    def parts(message: dict[str, Any]) -> list[Any]:
        kind, content = said if message["role"] == "assistant" else written, message["content"]
        if isinstance(content, str):
            return [{"type": kind, "text": content}]
        urls = (part.get("image_url", {}).get("url") for part in content)
        return [image(url) if url else {**part, "type": kind} for part, url in zip(content, urls, strict=True)]

    return [{"role": message["role"], "content": parts(message)} for message in messages]


def openai_responses() -> Ask:
    """Ask for responses with the openai package."""
    import openai

    client = openai.OpenAI(max_retries=0)

    def ask(messages: list[Any]) -> str:
        items = with_parts(
            messages,
            "input_text",
            "output_text",
            lambda url: {"type": "input_image", "image_url": url, "detail": "auto"},
        )
        return str(client.responses.create(model="any", input=items).output_text)

    return ask


def anthropic_messages() -> Ask:
    """Ask with the anthropic package."""
    import anthropic

    client = anthropic.Anthropic(max_retries=0)

    def block(url: str) -> Any:
        head, _, data = url.partition(";base64,")
        source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
        return {"type": "image", "source": source if data else {"type": "url", "url": url}}

    def ask(messages: list[Any]) -> str:
        asked = with_parts(messages, "text", "text", block)
        answer = client.messages.create(model="any", max_tokens=1000, messages=asked)
        counted = client.messages.count_tokens(model="any", messages=asked)
        assert counted.input_tokens == answer.usage.input_tokens
        return str(answer.content[0].text)

    return ask


def pictures(ask: Ask) -> None:
    """Talk about pictures, then about another one in the place of the prompt's, then about one that isn't sent."""
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in SAMPLE["metadata"]["pictures"]]
    messages = SAMPLE["messages"]
    (own,) = (part for part in messages[0]["content"] if part["type"] == "image_url")
    for parts in ([{"type": "text", "text": "This?"}, shown[0]], [shown[1], {"type": "text", "text": "Or?"}, own]):
        messages = [*messages, {"role": "assistant", "content": ask(messages)}, {"role": "user", "content": parts}]
    ask(messages)
    ask([{"role": "user", "content": [shown[2] if part == own else part for part in SAMPLE["messages"][0]["content"]]}])
    far = {"type": "image_url", "image_url": {"url": "https://user:secret@example.com/a.png"}}
    with pytest.raises(Exception, match="relaxd fetches no media") as caught:
        ask([*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": [far]}])
    assert getattr(caught.value, "status_code", 0) == 400
    assert "secret" not in str(caught.value)
    end(SAMPLE["answer"], 0)


def items_openai() -> None:
    """Talk about items of any kind in chat completions, then about the prompt's again."""
    answers = list[Any]()
    ask, messages = chat_completions(answers), SAMPLE["messages"]
    (own,) = (part for part in messages[0]["content"] if part["type"] != "text")
    for part in (*SAMPLE["metadata"]["parts"], own):
        messages = [*messages, {"role": "assistant", "content": ask(messages)}, {"role": "user", "content": [part]}]
    ask(messages)
    end(SAMPLE["answer"], 0)


def pictures_openai() -> None:
    """Talk about pictures in chat completions, then go on with token ids, which may have no new ones."""
    image_token, answers = SAMPLE["metadata"]["image_token"], list[Any]()
    pictures(chat_completions(answers))
    third, address = answers[2], os.environ["ANTHROPIC_BASE_URL"]
    so_far = [*third.prompt_token_ids, *third.choices[0].token_ids]
    more = post(address + "/tokenize", {"prompt": "And?"})["tokens"]
    refused = refusal(address + "/inference/v1/generate", {"token_ids": [*so_far, image_token]})
    assert refused == f"400 token_ids[{len(so_far)}]"
    post(address + "/inference/v1/generate", {"token_ids": [*so_far, *more]})


def pictures_anthropic() -> None:
    """Talk about pictures in Anthropic's messages."""
    pictures(anthropic_messages())


def pictures_responses() -> None:
    """Talk about pictures in responses."""
    pictures(openai_responses())


def fail() -> None:
    """Ask, and fail with much output."""
    ask(SAMPLE["messages"])
    print("x" * 1_000_000)
    sys.exit("no luck")


def silent() -> None:
    """Never ask."""
    print("nothing to do")


def bad_result() -> None:
    """Ask, and write a result that is none."""
    ask(SAMPLE["messages"])
    Path(os.environ["RELAXD_RESULT"]).write_text('{"reward": "good"}')


def hang() -> None:
    """Ask, start a process, say which, and never end."""
    ask(SAMPLE["messages"])
    child = subprocess.Popen(["sleep", "3600"])
    Path(SAMPLE["metadata"]["pid"]).write_text(str(child.pid))
    signal.pause()


def steal() -> None:
    """Ask with the key of another session."""
    ask(SAMPLE["messages"], SAMPLE["metadata"]["key"])


def change() -> None:
    """Ask, and then change what was said."""
    said = ask(SAMPLE["messages"])
    ask([*SAMPLE["messages"], {**said, "content": "else"}, {"role": "user", "content": "And?"}])


def branch() -> None:
    """Talk on in two histories, after a sub-agent, a compaction, and another answer to the same messages."""
    messages, user = SAMPLE["messages"], {"role": "user", "content": "And?"}
    first = ask(messages)
    helper = [{"role": "system", "content": "Help."}, {"role": "user", "content": first["content"]}]
    helped = ask(helper, tools=TOOLS)
    messages = [*messages, first, {"role": "user", "content": helped["content"]}]
    second = ask(messages)
    compact = [*SAMPLE["messages"], {"role": "assistant", "content": f"So far {second['content']}"}, user]
    third = ask(compact)
    assert ask(compact, seed=1) != third
    ask([*compact, third, user])
    Path(os.environ["RELAXD_RESULT"]).write_text('{"reward": 0.5}')


def tokens() -> None:
    """Go on with token ids after a message, in place of its end token once; begin another history; ask wrongly."""
    asked = {"messages": SAMPLE["messages"], "return_token_ids": True}
    first = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)
    address = os.environ["ANTHROPIC_BASE_URL"] + "/inference/v1/generate"
    sampling = {"temperature": 0.1, "max_tokens": 100, "logprobs": 1, "stop_token_ids": [7], "n": None}
    more = post(os.environ["ANTHROPIC_BASE_URL"] + "/tokenize", {"prompt": "<|im_start|>And?"})["tokens"]
    so_far = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"], *more]
    answer = post(address, {"model": "any", "token_ids": so_far, "sampling_params": sampling})
    (choice,) = answer["choices"]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-float(one) for one in choice["token_ids"]]
    assert (choice["finish_reason"], answer["usage"]["prompt_tokens"]) == ("stop", len(so_far))
    ended_otherwise = [*so_far, *choice["token_ids"][:-1], more[0], *more]
    body = json.dumps({"token_ids": ended_otherwise, "stream": True}).encode()
    request = urllib.request.Request(address, body, {"x-api-key": os.environ["OPENAI_API_KEY"]})
    with urllib.request.urlopen(request, timeout=60) as stream:
        (said,) = json.loads(stream.readline().removeprefix(b"data: "))["choices"]
        assert stream.read().strip() == b"data: [DONE]"
    assert post(address, {"token_ids": more})["choices"][0]["token_ids"] != said["token_ids"]
    refusals = []
    for wrong in (
        {"token_ids": []},
        {"token_ids": [*more, 10**6]},
        {"token_ids": more, "features": {}},
        {"token_ids": more, "sampling_params": {"n": 2}},
        {"token_ids": more, "sampling_params": {"max_tokens": 0}},
        {"token_ids": more * 500, "sampling_params": {"logprobs": 3}},
    ):
        refusals.append(refusal(address, wrong))
    Path(os.environ["RELAXD_RESULT"]).write_text('{"reward": 0.5}')
    Path(SAMPLE["metadata"]["refusals"]).write_text("\n".join(refusals))


def talk() -> None:
    """Ask again and again, until a limit ends it."""
    messages = SAMPLE["messages"]
    while True:
        messages = [*messages, ask(messages), {"role": "user", "content": "And?"}]


if __name__ == "__main__":
    what = globals()[sys.argv[1]]
    asyncio.run(what()) if asyncio.iscoroutinefunction(what) else what()
