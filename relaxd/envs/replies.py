"""Replies of a model, divided into thinking, text and tool calls."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from relaxd.data.examples import Message
from relaxd.data.templating import ChatTemplate
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.reply_formats import REPLY_FORMATS, ParsedReply, ReplyFormat, Tools
from relaxd.envs.tool_calls import ToolCall
from relaxd.models import DataError

THINKING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
)
"""Tags between which models think."""
PROBE = ToolCall("add", {"a": 2, "b": "x"})
PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "first"},
                    "b": {"type": "string", "description": "second"},
                },
                "required": ["a", "b"],
            },
        },
    }
]
"""A tool with a call that shows in which form a chat template writes calls."""


def reply_format(template: ChatTemplate) -> ReplyFormat | None:
    """Return the format that finds a call as the template wrote it; None if there is no such format or call."""
    asked: Message = {"role": "user", "content": "Zq-question-qZ"}
    for tools, as_text in product((PROBE_TOOLS, []), (False, True)):  # some templates take no tools, or want text
        arguments = json.dumps(PROBE.arguments) if as_text else PROBE.arguments
        function = {"name": PROBE.name, "arguments": arguments}
        called = ParsedReply(calls=(PROBE,)).message
        called["tool_calls"][0] |= {"id": "call00001", "function": function}
        try:
            opened, closed = template.render([asked], tools), template.render_closed([asked, called], tools)
        except DataError:
            continue
        # The opening may have a tag of thinking, which templates leave out of earlier replies.
        texts = [closed.removeprefix(opened), closed.rpartition(asked["content"])[2]]
        for form in REPLY_FORMATS:
            if any(form.read(text, PROBE_TOOLS).calls == (PROBE,) for text in texts):
                return form
    return None


def read_reply(
    tokenizer: PromptTokenizer,
    tokens: Sequence[int],
    form: ReplyFormat | None,
    tools: Tools = (),
    *,
    in_thinking: bool = False,
    first_call: int = 1,
) -> ParsedReply:
    """Decode a reply and divide it like `parse_reply`. A final special token is left out."""
    if len(tokens) and tokenizer.is_special(int(tokens[-1])):
        tokens = tokens[:-1]
    text = tokenizer.decode(tokens, special=True)
    return parse_reply(text, form, tools, in_thinking=in_thinking, first_call=first_call)


def parse_reply(
    text: str, form: ReplyFormat | None, tools: Tools = (), *, in_thinking: bool = False, first_call: int = 1
) -> ParsedReply:
    """Divide a reply into thinking, text and calls. Takes time linear in the text.

    Args:
        text: the reply with special tokens, without the token that ended it.
        form: the form of tool calls; None: all is text.
        tools: the tools' schemas, by which values that are written without quotes get their types.
        in_thinking: True if the prompt ends with the tag that begins thinking.
        first_call: number of the first call in the conversation, for ids.
    """
    thinking, said = _split_thinking(text, in_thinking)
    reply = form.read(said, tools) if form else ParsedReply(said)
    calls = tuple(
        replace(call, id=f"call{number:05d}")  # nine letters and digits, which Mistral's templates ask for
        for number, call in enumerate((call for call in reply.calls if not call.problem), first_call)
    )
    problem = reply.problem or next((call.problem for call in reply.calls if call.problem), "")
    return replace(reply, thinking=thinking or reply.thinking, calls=calls, problem=problem)


def _split_thinking(text: str, in_thinking: bool) -> tuple[str, str]:
    """Return thinking and the text after it."""
    for begin, end in THINKING_TAGS:
        begun = text.lstrip().startswith(begin)
        before, closing, after = text.partition(end)
        if closing:
            return before.strip().removeprefix(begin).strip(), after.strip()
        if begun:
            return text.strip().removeprefix(begin).strip(), ""
    return (text.strip(), "") if in_thinking else ("", text)
