"""Parses replies of a model into thinking, text and tool calls."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from relaxd.data.examples import Message
from relaxd.data.templating import ChatTemplate
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.environment import ToolCall, call_of, json_of
from relaxd.models import DataError

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, in the form that chat templates take."""


@dataclass(frozen=True)
class ParsedReply:
    """A model's reply, divided into thinking, text and tool calls."""

    text: str = ""
    """The reply's text, without thinking and tool calls."""
    thinking: str = ""
    """The model's thinking, which comes before the reply's text."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls in the reply that can be parsed, with ids."""
    problem: str = ""
    """Reason why text in a call's place can't be parsed as a call; "" if all calls can."""

    @property
    def message(self) -> Message:
        """The reply as a message in the form that chat templates take."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True)
class ReplyFormat:
    """A format in which models write tool calls."""

    name: str
    read: Callable[[str, Tools], ParsedReply]
    """Function that parses a reply. It takes the reply's text without thinking, and the tools' schemas."""


def _blocks(text: str, opening: str, closing: str) -> tuple[str, list[str], str]:
    """Return the text outside of tags, the text in each pair of tags, and a problem if the last pair isn't closed."""
    first, *rest = text.split(opening)
    outside: list[str] = [first]
    blocks: list[str] = []
    for one in rest:
        block, closed, after = one.partition(closing)
        if not closed:
            return "".join(outside).strip(), blocks, f"a tool call has no {closing}"
        blocks.append(block)
        outside.append(after)
    return "".join(outside).strip() if blocks else text, blocks, ""


def _tagged(text: str, opening: str, closing: str) -> list[tuple[str, str]]:
    """Return for each tagged text the first group of the pattern `opening`, and the text up to the closing tag."""
    found, tags, start = [], re.compile(opening), 0
    while (tag := tags.search(text, start)) and (end := text.find(closing, tag.end())) >= 0:
        found.append((tag[1], text[tag.end() : end]))
        start = end + len(closing)
    return found


def _json(tag: str, text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as <tag>{"name": ..., "arguments": {...}}</tag>, a list of these, or one in each line."""
    outside, blocks, problem = _blocks(text, f"<{tag}>", f"</{tag}>")
    calls: list[ToolCall] = []
    for block in blocks:
        found = json_of(block)
        lines = [json_of(line) for line in block.strip().split("\n")] if found is None else []
        several = found if isinstance(found, list) else lines
        calls += map(call_of, several if several and all(several) else [found])
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _functions(tag: str, text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as <tag><function=NAME><parameter=KEY>VALUE</parameter></function></tag>"""
    outside, blocks, problem = _blocks(text, f"<{tag}>", f"</{tag}>")
    calls = []
    for block in blocks:
        name = re.match(r"\s*<function=([^>\n]+)>", block)
        pairs = _tagged(block, r"<parameter=([^<>\n]+)>", "</parameter>")
        calls.append(_typed(name[1], pairs, tools) if name else ToolCall(problem="a tool call is <function=NAME>..."))
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _invoke(prefix: str, tag: str, text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as <tag><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></tag>. The names
    of the inner tags begin with `prefix`."""
    outside, blocks, problem = _blocks(text, f"<{tag}>", f"</{tag}>")
    calls = []
    for block in blocks:
        invoked = _tagged(block, rf'<{prefix}invoke name="([^"<>]*)">', f"</{prefix}invoke>")
        for name, body in invoked:
            pairs = _tagged(body, rf'<{prefix}parameter name="([^"<>]*)"[^<>]*>', f"</{prefix}parameter>")
            calls.append(_typed(name, pairs, tools))
        if not invoked:
            calls.append(ToolCall(problem='a tool call is <invoke name="NAME">...'))
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _glm(text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"""
    outside, blocks, problem = _blocks(text, "<tool_call>", "</tool_call>")
    calls = []
    for block in blocks:
        name, *rest = block.split("<arg_key>")
        split = [one.partition("</arg_key>") for one in rest]
        values = [(key, value.partition("<arg_value>")[2].rpartition("</arg_value>")) for key, _, value in split]
        pairs = [(key, value) for key, (value, closed, _) in values if closed]
        calls.append(_typed(name, pairs, tools))
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _llama(text: str, tools: Tools) -> ParsedReply:
    """Parse a reply that is {"name": ..., "parameters": {...}}, possibly after <|python_tag|>; ";" divides calls"""
    tag, body = text.strip().startswith("<|python_tag|>"), text.strip().removeprefix("<|python_tag|>").strip()
    if not tag and not re.match(r'\{\s*"(name|type|function)"', body):
        return ParsedReply(text)
    calls: list[ToolCall] = []
    decoder, place = json.JSONDecoder(), 0
    while place < len(body):
        try:
            value, place = decoder.raw_decode(body, place)
        except (ValueError, RecursionError):
            return ParsedReply(calls=tuple(calls), problem='a tool call is {"name": ..., "parameters": {...}} in JSON')
        calls.append(call_of(value))
        while place < len(body) and body[place] in "; \n":
            place += 1
    return ParsedReply(calls=tuple(calls))


def _mistral(text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...}"""
    outside, *blocks = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for block in blocks:
        name, _, arguments = block.partition("[ARGS]")
        if block.lstrip().startswith("["):
            found = _first_json(block)
            calls += map(call_of, found if isinstance(found, list) else [found])
        else:
            calls.append(call_of({"name": name.partition("[CALL_ID]")[0], "arguments": _first_json(arguments)}))
    return ParsedReply(outside.strip() if blocks else text, calls=tuple(calls))


def _gemma(text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as <|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>, where <|"|> quotes texts"""
    outside, blocks, problem = _blocks(text, "<|tool_call>", "<tool_call|>")
    calls = []
    for block in blocks:
        name, brace, rest = block.strip().removeprefix("call:").partition("{")
        parts = (brace + rest).split('<|"|>')
        parts[::2] = [re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        calls.append(call_of({"name": name, "arguments": json_of("".join(parts))}))
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _deepseek_token(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


def _deepseek(text: str, tools: Tools) -> ParsedReply:
    """Parse DeepSeek's calls between special tokens; models before V3.1 write the arguments in a fenced block."""
    outside, calls_begin, body = text.partition(_deepseek_token("tool calls begin"))
    _, blocks, problem = _blocks(body, _deepseek_token("tool call begin"), _deepseek_token("tool call end"))
    calls = []
    for block in blocks:
        name, _, arguments = block.partition(_deepseek_token("tool sep"))
        if "```json" in arguments:
            name, _, fenced = arguments.partition("```json")
            arguments = fenced.rpartition("```")[0]
        calls.append(_named(name, arguments))
    return ParsedReply(outside.strip() if calls_begin else text, calls=tuple(calls), problem=problem)


def _kimi(text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>"""
    outside, section, body = text.partition("<|tool_calls_section_begin|>")
    _, blocks, problem = _blocks(body, "<|tool_call_begin|>", "<|tool_call_end|>")
    parts = [block.partition("<|tool_call_argument_begin|>") for block in blocks]
    calls = [_named(name.strip().removeprefix("functions.").rpartition(":")[0], rest) for name, _, rest in parts]
    return ParsedReply(outside.strip() if section else text, calls=tuple(calls), problem=problem)


def _cohere(text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>"""
    outside, blocks, problem = _blocks(text, "<|START_ACTION|>", "<|END_ACTION|>")
    calls = []
    for block in blocks:
        found = json_of(block)
        for one in found if isinstance(found, list) else [found]:
            named = {**one, "name": one.get("tool_name")} if isinstance(one, dict) else one
            calls.append(call_of(named))
    outside = outside.replace("<|START_RESPONSE|>", "").replace("<|END_RESPONSE|>", "")
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _python(text: str, tools: Tools) -> ParsedReply:
    """Parse calls written as a list in Python: <|tool_call_start|>[NAME(KEY=VALUE), ...]<|tool_call_end|>"""
    outside, blocks, problem = _blocks(text, "<|tool_call_start|>", "<|tool_call_end|>")
    calls: list[ToolCall] = []
    for block in blocks:
        try:
            listed = ast.parse(block.strip(), mode="eval").body
            for one in listed.elts if isinstance(listed, ast.List) else [listed]:
                if not isinstance(one, ast.Call) or one.args:
                    raise ValueError
                arguments = {str(pair.arg): ast.literal_eval(pair.value) for pair in one.keywords}
                calls.append(ToolCall(ast.unparse(one.func), json.loads(json.dumps(arguments))))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            calls.append(ToolCall(problem="tool calls are [NAME(KEY=VALUE), ...] in Python"))
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _harmony(text: str, tools: Tools) -> ParsedReply:
    """Parse gpt-oss's messages: channel analysis is thinking, a message to functions.NAME a call, others are text."""
    thinking, said, calls = [], [], []
    for part in text.split("<|start|>"):
        header, tag, body = part.partition("<|message|>")
        if not tag:
            if header.strip() not in ("", "assistant"):
                said.append(header)
            continue
        body = re.split(r"<\|(?:end|call|return)\|>", body, maxsplit=1)[0]
        if recipient := re.search(r"to=functions\.([^\s<]+)", header):
            calls.append(_named(recipient[1], body))
        elif "<|channel|>analysis" in header:
            thinking.append(body)
        else:
            said.append(body)
    return ParsedReply("\n".join(said), "\n".join(thinking), tuple(calls))


def _named(name: str, arguments: str) -> ToolCall:
    """Return a tool call, given its arguments as JSON text."""
    return call_of({"name": name.strip(), "arguments": arguments.strip()})


def _first_json(text: str) -> Any:
    """Return the JSON value at the beginning of a text; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):
        return None


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> ToolCall:
    """Return a tool call from pairs of an argument's name and unquoted value, converted by the tool's schema."""
    name = name.strip()
    if not name:
        return ToolCall(problem="a tool call has no name")
    functions = [tool.get("function", tool) for tool in tools]
    schema = next((one.get("parameters") or {} for one in functions if one.get("name") == name), {})
    known = schema.get("properties") or {}
    return ToolCall(name, {key.strip(): _value(value, known.get(key.strip()) or {}) for key, value in pairs})


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return an argument's value: the text if the schema's type is string or the text isn't JSON, else the JSON
    value. Removes a line end on either side."""
    text = text.removeprefix("\n").removesuffix("\n")
    if schema.get("type") == "string":
        return text
    value = json_of(text)
    return text if value is None and text.strip() != "null" else value


DSML = "\uff5cDSML\uff5c"
"""Prefix of the tags in which DeepSeek's models since V3.2 write calls."""
REPLY_FORMATS = (
    ReplyFormat("gpt-oss", _harmony),
    ReplyFormat("deepseek", _deepseek),
    ReplyFormat("deepseek-v3.2", partial(_invoke, DSML, f"{DSML}function_calls")),
    ReplyFormat("deepseek-v4", partial(_invoke, DSML, f"{DSML}tool_calls")),
    ReplyFormat("kimi", _kimi),
    ReplyFormat("mistral", _mistral),
    ReplyFormat("cohere", _cohere),
    ReplyFormat("lfm2", _python),
    ReplyFormat("gemma4", _gemma),
    ReplyFormat("minimax", partial(_invoke, "", "minimax:tool_call")),
    ReplyFormat("qwen3-coder", partial(_functions, "tool_call")),
    ReplyFormat("seed-oss", partial(_functions, "seed:tool_call")),
    ReplyFormat("glm", _glm),
    ReplyFormat("hermes", partial(_json, "tool_call")),
    ReplyFormat("nemotron-v2", partial(_json, "TOOLCALL")),
    ReplyFormat("tool-calls", partial(_json, "tool_calls")),
    ReplyFormat("llama3", _llama),
)
"""All known formats of tool calls, named after the models that write them."""


THINKING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
)
"""Opening and closing tags of models' thinking."""
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
"""Schema of the tool that PROBE calls. PROBE shows in which format a chat template writes calls."""


def reply_format(template: ChatTemplate) -> ReplyFormat | None:
    """Return the format in which a chat template writes tool calls; None if it writes no calls, or in an unknown
    format."""
    asked: Message = {"role": "user", "content": "Zq-question-qZ"}
    for tools, as_text in product((PROBE_TOOLS, []), (False, True)):  # some templates take no tools, or text arguments
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
        form: the format of tool calls; None: all is text.
        tools: the tools' schemas, which give the types of values without quotes.
        in_thinking: True if the prompt ends with the tag that begins thinking.
        first_call: number of the first call in the conversation, for ids.
    """
    thinking, said = _split_thinking(text, in_thinking)
    reply = form.read(said, tools) if form else ParsedReply(said)
    calls = tuple(
        replace(call, id=f"call{number:05d}")  # Mistral's templates require nine letters and digits
        for number, call in enumerate((call for call in reply.calls if not call.problem), first_call)
    )
    problem = reply.problem or next((call.problem for call in reply.calls if call.problem), "")
    return replace(reply, thinking=thinking or reply.thinking, calls=calls, problem=problem)


def _split_thinking(text: str, in_thinking: bool) -> tuple[str, str]:
    """Return a reply's thinking, and the text after the thinking."""
    for begin, end in THINKING_TAGS:
        begun = text.lstrip().startswith(begin)
        before, closing, after = text.partition(end)
        if closing:
            return before.strip().removeprefix(begin).strip(), after.strip()
        if begun:
            return text.strip().removeprefix(begin).strip(), ""
    return (text.strip(), "") if in_thinking else ("", text)
