"""A conversation's tokens are those that the engine saw and returned, with the chat templates of many models."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxd.data.examples import Example, Message
from relaxd.envs.environment import ToolCall
from relaxd.envs.replies import ParsedReply, read_reply, reply_format
from relaxd.envs.token_history import TokenHistory
from relaxd.models import DataError
from tests.kit.templates import FOLDER, TEMPLATES, template_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "x"},
                    "b": {"type": "integer", "description": "y"},
                },
                "required": ["a", "b"],
            },
        },
    }
]
STOPS = {
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|end|>"),
    "llama": ("<|eot_id|>",),
    "llava": ("</s>",),
    "muse": ("<|eot|>",),
    "phi": ("<|end|>",),
    "smolvlm": ("<end_of_utterance>",),
    "": ("<|im_end|>",),
}
"""Tokens at which models stop, by the beginning of their templates' names."""


def stops_of(name: str) -> tuple[str, ...]:
    return next(stops for start, stops in STOPS.items() if name.startswith(start))


def takes_tools(name: str) -> bool:
    return "tools" in (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, thinking: str = "") -> Message:
    return ParsedReply(text, thinking).message


def calls(*sums: tuple[int, int], thinking: str = "", text: str = "") -> Message:
    made = (ToolCall("add", {"a": a, "b": b}, id=f"call{number:05d}") for number, (a, b) in enumerate(sums, 1))
    return ParsedReply(text, thinking, tuple(made)).message


def result(text: str, number: int = 1) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "add", "content": text}


# --- what the engine saw is what is trained on ------------------------------------------------------------------------


@dataclass
class Engine:
    """A record of an engine's prompts and replies."""

    prompts: list[list[int]] = field(default_factory=list)
    replies: list[tuple[list[int], list[float], list[int]]] = field(default_factory=list)

    def answer(self, history: TokenHistory, tokens: list[int], message: Message, stopped: bool) -> None:
        count, turn = len(tokens), len(self.replies)
        reply = (tokens, [-(turn + 1) / 8 - place / 1024 for place in range(count)], [turn + 5] * count)
        self.prompts.append(history.context)
        self.replies.append(reply)
        history.add_reply(*reply, message, stopped=stopped)


@st.composite
def turns(draw: st.DrawFn, name: str, tools: bool) -> list[tuple[list[int], bool, Message, list[Message]]]:
    """Draw turns: sampled tokens, whether the model stopped, what was parsed, and what the environment answers."""
    tokenizer = template_tokenizer(name)
    plain = [token for token in range(700) if token not in tokenizer.added_tokens]
    stops = [tokenizer.encode_text(stop)[0] for stop in stops_of(name)]
    text = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.sampled_from(plain), min_size=1, max_size=8))
        stopped = draw(st.integers(0, 3)) > 0
        tokens += [draw(st.sampled_from(stops))] if stopped else []
        observed = draw(text) + draw(st.sampled_from(["", *stops_of(name), "<s>"])) + draw(text) + "."
        if tools and draw(st.booleans()):
            message = calls((draw(st.integers(0, 9)), 3), thinking=draw(st.sampled_from(["", "why"])))
            answer = [result(observed)]
        else:
            message = said(draw(text), draw(st.sampled_from(["", "why"])))
            answer = [user(observed)]
        drawn.append((tokens, stopped, message, answer))
    return drawn


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.data())
@settings(max_examples=12, deadline=None)
def test_the_trainer_gets_what_the_engine_saw_and_returned(name: str, data: st.DataObject) -> None:
    tokenizer = template_tokenizer(name)
    tools = TOOLS if takes_tools(name) and data.draw(st.booleans()) else []
    example = Example([user("What is 2 + 3?")], tools=tools)
    history, engine = TokenHistory(tokenizer, example), Engine()
    assert history.context == history.prompt_tokens == tokenizer.encode([example])[0].tolist()
    masks: list[int] = []
    for tokens, stopped, message, answer in data.draw(turns(name, bool(tools))):
        engine.answer(history, tokens, message, stopped)
        before = engine.prompts[-1] + tokens
        masks += [1] * len(tokens)
        assert history.context == before
        added = history.add_messages(answer)
        kept = len(history.context) - added
        assert added > 0
        assert kept in (len(before), len(before) - stopped)  # a token that the template has otherwise leaves
        assert history.context[:kept] == before[:kept]
        masks[kept - len(history.prompt_tokens) :] = [0] * added
    engine.answer(history, [400, 401], said("end"), stopped=False)
    last, (tokens, _, _) = engine.prompts[-1], engine.replies[-1]
    assert history.prompt_tokens + history.columns["tokens"].tolist() == last + tokens
    assert history.columns["loss_mask"].tolist() == [*masks, 1, 1]
    columns = (
        history.columns["tokens"],
        history.columns["loss_mask"],
        history.columns["logprobs"],
        history.columns["versions"],
    )
    assert [column.dtype for column in columns] == [np.int32, np.uint8, np.float32, np.int64]
    assert len({len(column) for column in columns}) == 1
    place = 0
    for (tokens, logprobs, versions), prompt in zip(engine.replies, engine.prompts, strict=True):
        place = len(prompt) - len(history.prompt_tokens)
        own = history.columns["loss_mask"][place : place + len(tokens)] == 1
        assert own[:-1].all()
        assert np.array_equal(history.columns["tokens"][place : place + len(tokens)][own], np.array(tokens)[own])
        assert np.array_equal(history.columns["logprobs"][place : place + len(tokens)][own], np.float32(logprobs)[own])
        assert np.array_equal(history.columns["versions"][place : place + len(tokens)][own], np.array(versions)[own])
    assert (history.columns["logprobs"][history.columns["loss_mask"] == 0] == 0).all()
    assert (history.columns["versions"] >= 5).all()


# --- and what the template writes -------------------------------------------------------------------------------------

CHATS: dict[str, list[Message]] = {
    "plain": [user("Hi"), said("Hello."), user("What is 2+3?"), said("It is 5."), user("Thanks")],
    "thinking": [user("2+3?"), said("It is 5.", "Two and three."), user("Sure?"), said("Yes.", "Hm."), user("Thanks")],
    "tools": [user("2+3?"), calls((2, 3)), result("5"), said("It is 5."), user("3+4?"), calls((3, 4)), result("7")],
    "parallel": [user("Two?"), calls((1, 1), (5, 61)), result("2"), result("11", 2), said("2, 11."), user("Thanks")],
    "thinking and tools": [
        user("2+3?"),
        calls((2, 3), thinking="Use add."),
        result("5"),
        said("It is 5.", "So."),
        user("!"),
    ],
}


THINK_END = "</think>"


def written(name: str, chat: list[Message], turn: int, after: int, tools: list[Any]) -> tuple[str, str]:
    """Return a reply up to its end token as the template writes it, and what the template writes after it."""
    template, reply = template_tokenizer(name).template, chat[turn]
    assert template is not None
    opened, whole = template.render(chat[:turn], tools), template.render(chat[:after], tools)
    made = reply.get("tool_calls")
    last = str(made[-1]["function"]["arguments"]["b"]) if made else reply["content"]
    start = next((at for at, (a, b) in enumerate(zip(opened, whole, strict=False)) if a != b), len(opened))
    if start < len(opened):  # the opening has a tag for thinking, which the template leaves out later
        start = whole.index("<tool_call>" if made else last, start - 2)  # both may begin with "<t"
    said_until = whole.index(last, start) + len(last)
    end = min(at + len(stop) for stop in stops_of(name) if (at := whole.find(stop, said_until)) >= 0)
    return whole[start:end], whole[end:]


def continued(name: str, kind: str) -> str:
    """Continue a conversation of replies as the template writes them; tell whether it changes replies later."""
    tokenizer, chat = template_tokenizer(name), CHATS[kind]
    assert tokenizer.template is not None
    tools = TOOLS if kind not in ("plain", "thinking") else []
    if tools and not takes_tools(name):
        return "no tools"
    try:
        whole = tokenizer.template.render(chat, tools)
    except DataError:
        return "refused"
    if kind == "parallel" and "61" not in whole:
        return "leaves calls out"
    turns = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
    history, form = TokenHistory(tokenizer, Example(chat[:1], tools=tools)), reply_format(tokenizer.template)
    for turn, after in zip(turns, [*turns[1:], len(chat)], strict=True):
        text, tail = written(name, chat, turn, after, tools)
        tokens = tokenizer.encode_text(text)
        reply = read_reply(tokenizer, tokens, form, tools, in_thinking=history.opens_thinking and THINK_END in text)
        if form:
            assert [call.arguments for call in reply.calls] == [
                call["function"]["arguments"] for call in chat[turn].get("tool_calls", [])
            ]
            assert reply.text == chat[turn]["content"]
        history.add_reply(tokens, [0.0] * len(tokens), [0] * len(tokens), chat[turn])
        history.add_messages(chat[turn + 1 : after])
        assert tokenizer.decode(history.context, special=True).endswith(text + tail)
    if tokenizer.decode(history.context, special=True) != whole:
        return "changes replies"
    assert history.context == tokenizer.encode_text(whole)
    return "equal"


WITHOUT_TOOLS = {name: "no tools" for name in TEMPLATES if not takes_tools(name)}
OPENS_THINKING = dict.fromkeys(("nemotron_3_nano", "qwen3_5_think"), "changes replies")
"""The beginning of a reply has a tag that the template leaves out later."""
OTHERWISE = {
    "plain": OPENS_THINKING | dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), "changes replies"),
    "thinking": OPENS_THINKING | dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), "changes replies"),
    "tools": OPENS_THINKING | WITHOUT_TOOLS,
    "parallel": OPENS_THINKING
    | WITHOUT_TOOLS
    | {"gptoss": "leaves calls out", "llama3_1": "refused", "llama3_2": "refused"},
    "thinking and tools": OPENS_THINKING
    | WITHOUT_TOOLS
    | dict.fromkeys(("gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5", "qwen3"), "changes replies"),
}


@pytest.mark.parametrize("kind", CHATS)
def test_tokens_are_those_of_the_whole_conversation_where_templates_change_nothing(kind: str) -> None:
    found = {name: continued(name, kind) for name in TEMPLATES}
    assert {name: how for name, how in found.items() if how != "equal"} == OTHERWISE[kind]
