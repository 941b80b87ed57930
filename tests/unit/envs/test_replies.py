"""Replies are divided into thinking, text and calls, in the form of each family of models."""

import time

from relaxd.data.templating import ChatTemplate
from relaxd.envs.environment import ToolCall
from relaxd.envs.replies import DSML, REPLY_FORMATS, ParsedReply, parse_reply, reply_format
from tests.kit.cases import each
from tests.kit.templates import TEMPLATES, template_tokenizer

FORMATS = {form.name: form for form in REPLY_FORMATS}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}},
    }
]
ADD = ToolCall("add", {"a": 2, "b": "x"}, id="call00001")


def deepseek(*words: str) -> str:
    """Return a text with special tokens of DeepSeek in the place of ~."""
    bar, space = "\uff5c", "\u2581"
    return "".join(f"<{bar}{word[1:].replace(' ', space)}{bar}>" if word.startswith("~") else word for word in words)


ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "x"}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
    '<parameter name="b">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": "x"}, "id": "abcdefghi"}]',
    "deepseek": deepseek(
        "~tool calls begin", "~tool call begin", "function", "~tool sep", 'add\n```json\n{"a": 2, "b": "x"}\n```',
        "~tool call end", "~tool calls end",
    ),
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 2, "b": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "cohere": '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 2, "b": "x"}}]<|END_ACTION|>',
    "lfm2": "<|tool_call_start|>[add(a=2, b='x')]<|tool_call_end|>",
    "gemma4": '<|tool_call>call:add{a:2,b:<|"|>x<|"|>}<tool_call|>',
    "seed-oss": "<seed:tool_call>\n<function=add>\n<parameter=a>2</parameter>\n<parameter=b>x</parameter>\n"
    "</function>\n</seed:tool_call>",
    "deepseek-v3.2": (
        '<DSMLfunction_calls>\n<DSMLinvoke name="add">\n<DSMLparameter name="a" string="false">2</DSMLparameter>'
        '\n<DSMLparameter name="b" string="true">x</DSMLparameter>\n</DSMLinvoke>\n</DSMLfunction_calls>'
    ).replace("DSML", DSML),
    "nemotron-v2": '<TOOLCALL>[{"name": "add", "arguments": {"a": 2, "b": "x"}}]</TOOLCALL>',
    "tool-calls": '<tool_calls>\n{"name": "add", "arguments": {"a": 2, "b": "x"}}\n</tool_calls>',
    "gpt-oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": "x"}',
}  # fmt: skip


@each("name", ONE_CALL)
def test_thinking_text_and_call_are_told_apart(name: str) -> None:
    if name == "gpt-oss":
        before = (
            "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
        )
        reply = before + "<|start|>assistant" + ONE_CALL[name]
    else:
        reply = "<think>\nWhy?\n</think>\n\nI add.\n" + ONE_CALL[name]
    assert parse_reply(reply, FORMATS[name], TOOLS) == ParsedReply("I add.", "Why?", (ADD,))


@each(
    ("name", "text", "calls"),
    [
        ("llama3", '{"name": "add", "parameters": {"a": 2, "b": "x"}}', [{"a": 2, "b": "x"}]),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "add", "arguments": {}}', [{}, {}]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]x[ARGS]{}', [{"a": 1}, {}]),
        ("deepseek", deepseek("~tool calls begin", "~tool call begin", "a", "~tool sep", "{}", "~tool call end"), [{}]),
        ("lfm2", "<|tool_call_start|>[f(a=[1, {'b': None}]), g.h()]<|tool_call_end|>", [{"a": [1, {"b": None}]}, {}]),
        ("hermes", ONE_CALL["hermes"] * 2, [{"a": 2, "b": "x"}] * 2),
        ("qwen3-coder", "<tool_call><function=add><parameter=a>[1]</parameter></function></tool_call>", [{"a": [1]}]),
        ("qwen3-coder", "<tool_call><function=f><parameter=c>\nx\ny\n</parameter></tool_call>", [{"c": "x\ny"}]),
    ],
)  # fmt: skip
def test_forms_with_variants(name: str, text: str, calls: list[dict[str, object]]) -> None:
    reply = parse_reply(text, FORMATS[name], TOOLS, first_call=7)
    assert [call.arguments for call in reply.calls] == calls
    assert [call.id for call in reply.calls] == [f"call{7 + number:05d}" for number in range(len(calls))]
    assert (reply.text, reply.problem) == ("", "")


@each("name", FORMATS)
def test_a_reply_without_calls_is_text_as_it_was_written(name: str) -> None:
    assert parse_reply(" {5}\n", FORMATS[name], TOOLS) == parse_reply(" {5}\n", None) == ParsedReply(" {5}\n")


@each(
    ("name", "text", "problem"),
    [
        ("hermes", "a <tool_call>{", "a tool call has no </tool_call>"),
        ("hermes", "a <tool_call>x</tool_call>", "in JSON"),
        ("qwen3-coder", "a <tool_call>x</tool_call>", "a tool call is <function=NAME>"),
        ("glm", "a <tool_call> </tool_call>", "a tool call has no name"),
        ("mistral", "a [TOOL_CALLS]add", "the arguments of add are no object in JSON"),
        ("mistral", "a [TOOL_CALLS][1]", "in JSON"),
        ("cohere", "a <|START_ACTION|>[1]<|END_ACTION|>", "in JSON"),
        ("lfm2", "a <|tool_call_start|>[add(1)]<|tool_call_end|>", "in Python"),
        ("lfm2", f"a <|tool_call_start|>{'(' * 5000}<|tool_call_end|>", "in Python"),
        ("lfm2", "a <|tool_call_start|>[add(a=open(1))]<|tool_call_end|>", "in Python"),
        ("lfm2", "a <|tool_call_start|>[add(a={1})]<|tool_call_end|>", "in Python"),
        ("gpt-oss", "<|message|>a<|end|><|start|>assistant to=functions.add<|message|>{", "the arguments of add"),
        ("llama3", '<|python_tag|>{"name": ', "in JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_as_a_call_is_a_problem(name: str, text: str, problem: str) -> None:
    reply = parse_reply(text, FORMATS[name], TOOLS)
    assert problem in reply.problem
    assert reply.calls == ()
    assert reply.text == ("" if name == "llama3" else "a")


@each(
    ("text", "in_thinking", "thinking", "said"),
    [
        ("why</think>5", True, "why", "5"),
        ("<think>why</think>\n\n5", False, "why", "5"),
        ("<think>why <tool_call>{}</tool_call>", False, "why <tool_call>{}</tool_call>", ""),
        ("why", True, "why", ""),
        ("5", False, "", "5"),
        ("[THINK]why[/THINK]5", False, "why", "5"),
    ],
)
def test_thinking_is_split_off(text: str, in_thinking: bool, thinking: str, said: str) -> None:
    assert parse_reply(text, FORMATS["hermes"], in_thinking=in_thinking) == ParsedReply(said, thinking)


@each("name", ONE_CALL)
def test_the_form_is_found_by_what_a_template_writes(name: str) -> None:
    call = f"{{% if m.tool_calls %}}{{% raw %}}{ONE_CALL[name]}{{% endraw %}}{{% endif %}}"
    source = "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}" + call + "{% endfor %}"
    assert reply_format(ChatTemplate(source, {}, "model.path")) == FORMATS[name]


def test_forms_of_real_templates() -> None:
    found = {}
    for name in TEMPLATES:
        template = template_tokenizer(name).template
        assert template is not None
        form = reply_format(template)
        found[name] = form.name if form else ""
    assert {name: form for name, form in found.items() if form} == {
        "deepseekv3": "deepseek",
        "gemma4_v5": "gemma4",
        "glm4moe": "glm",
        "gptoss": "gpt-oss",
        "lfm2_2_5": "lfm2",
        "lfm2_v2": "lfm2",
        "llama3_1": "llama3",
        "llama3_2": "llama3",
        "nemotron_3_nano": "qwen3-coder",
        "qwen2_5": "hermes",
        "qwen3": "hermes",
        "qwen3_5_think": "qwen3-coder",
        "qwen3_8": "qwen3-coder",
        "qwen3_instruct_2507": "hermes",
        "qwen3_training": "hermes",
        "qwen3_vl": "hermes",
    }


@each("name", ONE_CALL)
def test_long_replies_are_read_in_linear_time(name: str) -> None:
    """Parts of calls again and again, as a model writes that repeats itself; quadratic time would be minutes."""
    half = ONE_CALL[name][: len(ONE_CALL[name]) // 2]
    for text in (half * 20_000, ONE_CALL[name] * 5_000, half[:-3] * 20_000 + ONE_CALL[name]):
        began = time.process_time()
        parse_reply(text, FORMATS[name], TOOLS)
        assert time.process_time() - began < 10
