"""Replies of a model, divided into thinking, text and tool calls, which each family of models writes in its form."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relaxd.data.examples import Message
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.tool_calls import ToolCall, call_of, json_of

Tools = Sequence[Mapping[str, Any]]
THINKING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Tags between which models think."""


@dataclass(frozen=True)
class ParsedReply:
    """A reply of the model."""

    text: str = ""
    """The text without thinking and calls."""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    """The calls that can be read, with ids."""
    problem: str = ""
    """Why something that is written as a call can't be read as one; "" if all can."""

    @property
    def message(self) -> Message:
        """The reply as chat templates get it."""
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
    """A form of tool calls."""

    name: str
    signs: tuple[str, ...]
    """Texts that a chat template of this form has, all of them."""
    read: Callable[[str, Tools], ParsedReply]
    """Divides a reply without thinking, given the tools' schemas."""


def reply_format(template: str) -> ReplyFormat | None:
    """Return the form in which a chat template writes tool calls; None: it writes none, or in an unknown form."""
    return next((one for one in REPLY_FORMATS if all(sign in template for sign in one.signs)), None)


def read_reply(
    tokenizer: PromptTokenizer,
    tokens: Sequence[int],
    form: ReplyFormat | None,
    tools: Tools = (),
    *,
    in_thinking: bool = False,
    first_call: int = 1,
) -> ParsedReply:
    """Decode a reply and divide it as `parse_reply` does. Its last token is left out if it is a special one."""
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


def _blocks(text: str, opening: str, closing: str) -> tuple[str, list[str], str]:
    """Return the text outside of tags, what is in them, and a problem if the last one isn't closed."""
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


def _hermes(text: str, tools: Tools) -> ParsedReply:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    outside, blocks, problem = _blocks(text, "<tool_call>", "</tool_call>")
    return ParsedReply(outside, calls=tuple(map(call_of, blocks)), problem=problem)


def _xml(text: str, tools: Tools) -> ParsedReply:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"""
    outside, blocks, problem = _blocks(text, "<tool_call>", "</tool_call>")
    calls = []
    for block in blocks:
        name = re.match(r"\s*<function=([^>\n]+)>", block)
        pairs = re.findall(r"<parameter=([^>\n]+)>(.*?)</parameter>", block, re.DOTALL)
        calls.append(_typed(name[1], pairs, tools) if name else ToolCall(problem="a tool call is <function=NAME>..."))
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _glm(text: str, tools: Tools) -> ParsedReply:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"""
    outside, blocks, problem = _blocks(text, "<tool_call>", "</tool_call>")
    calls = []
    for block in blocks:
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", block, re.DOTALL)
        calls.append(_typed(block.partition("<arg_key>")[0], pairs, tools))
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _invoke(text: str, tools: Tools) -> ParsedReply:
    """<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>"""
    outside, blocks, problem = _blocks(text, "<minimax:tool_call>", "</minimax:tool_call>")
    calls = []
    for name, body in re.findall(r'<invoke name="([^"]*)">(.*?)</invoke>', "".join(blocks), re.DOTALL):
        calls.append(_typed(name, re.findall(r'<parameter name="([^"]*)">(.*?)</parameter>', body, re.DOTALL), tools))
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _llama(text: str, tools: Tools) -> ParsedReply:
    """{"name": ..., "parameters": {...}}, the whole reply, perhaps after <|python_tag|>; further calls after ;"""
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
        calls.append(call_of(json.dumps(value)))
        while place < len(body) and body[place] in "; \n":
            place += 1
    return ParsedReply(calls=tuple(calls))


def _mistral(text: str, tools: Tools) -> ParsedReply:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...}"""
    outside, *blocks = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for block in blocks:
        if block.strip().startswith("["):
            found = json_of(block.strip())
            calls += [call_of(json.dumps(one)) for one in found] if isinstance(found, list) else [call_of(block)]
        else:
            name, tag, arguments = block.partition("[ARGS]")
            calls.append(_named(name.partition("[CALL_ID]")[0], arguments if tag else ""))
    return ParsedReply(outside.strip() if blocks else text, calls=tuple(calls))


def _deepseek_token(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


def _deepseek(text: str, tools: Tools) -> ParsedReply:
    """Calls between special tokens, before V3.1 with the arguments in a fence."""
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
    """<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>"""
    outside, section, body = text.partition("<|tool_calls_section_begin|>")
    _, blocks, problem = _blocks(body, "<|tool_call_begin|>", "<|tool_call_end|>")
    parts = [block.partition("<|tool_call_argument_begin|>") for block in blocks]
    calls = [_named(name.strip().removeprefix("functions.").rpartition(":")[0], rest) for name, _, rest in parts]
    return ParsedReply(outside.strip() if section else text, calls=tuple(calls), problem=problem)


def _cohere(text: str, tools: Tools) -> ParsedReply:
    """<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>"""
    outside, blocks, problem = _blocks(text, "<|START_ACTION|>", "<|END_ACTION|>")
    calls = []
    for block in blocks:
        found = json_of(block.strip())
        for one in found if isinstance(found, list) else [found]:
            named = {**one, "name": one.get("tool_name")} if isinstance(one, dict) else one
            calls.append(call_of(json.dumps(named)))
    outside = outside.replace("<|START_RESPONSE|>", "").replace("<|END_RESPONSE|>", "")
    return ParsedReply(outside, calls=tuple(calls), problem=problem)


def _python(text: str, tools: Tools) -> ParsedReply:
    """<|tool_call_start|>[NAME(KEY=VALUE), ...]<|tool_call_end|>, in Python"""
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
    """Messages of channels: analysis is thinking, one to functions.NAME is a call, others are text."""
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
    """Return a call whose arguments are a text in JSON."""
    return call_of(json.dumps({"name": name.strip(), "arguments": arguments.strip()}))


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> ToolCall:
    """Return a call whose values are written without quotes."""
    name = name.strip()
    if not name:
        return ToolCall(problem="a tool call has no name")
    functions = [tool.get("function", tool) for tool in tools]
    schema = next((one.get("parameters") or {} for one in functions if one.get("name") == name), {})
    known = schema.get("properties") or {}
    return ToolCall(name, {key.strip(): _value(value, known.get(key.strip()) or {}) for key, value in pairs})


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument: a text if its schema says so or if it isn't JSON, without line ends around."""
    text = text.removeprefix("\n").removesuffix("\n")
    if schema.get("type") == "string":
        return text
    value = json_of(text.strip())
    return text if value is None and text.strip() != "null" else value


REPLY_FORMATS = (
    ReplyFormat("gpt-oss", ("<|channel|>", "<|message|>", "functions."), _harmony),
    ReplyFormat("deepseek", (_deepseek_token("tool call begin"),), _deepseek),
    ReplyFormat("kimi", ("<|tool_call_argument_begin|>",), _kimi),
    ReplyFormat("mistral", ("[TOOL_CALLS]",), _mistral),
    ReplyFormat("cohere", ("<|START_ACTION|>",), _cohere),
    ReplyFormat("lfm2", ("<|tool_call_start|>",), _python),
    ReplyFormat("minimax", ("<minimax:tool_call>",), _invoke),
    ReplyFormat("qwen3-coder", ("<tool_call>", "<function="), _xml),
    ReplyFormat("glm", ("<tool_call>", "<arg_key>"), _glm),
    ReplyFormat("hermes", ("<tool_call>",), _hermes),
    ReplyFormat("llama3", ("<|start_header_id|>", '"parameters": '), _llama),
)
"""All forms, the more particular ones first."""
