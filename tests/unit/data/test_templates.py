"""Chat templates are rendered as transformers renders them, with the features that templates of the hub use."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from relaxd.data.special_tokens import special_tokens
from relaxd.data.templating import ChatTemplate, chat_template_text, load_chat_template
from relaxd.models import DataError
from tests.kit.cases import each
from tests.kit.models import make_tiny_model

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "é <b>", "parameters": {"b": 1, "a": 2}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "hi é <b>"}],
    "system": [{"role": "system", "content": "S "}, {"role": "user", "content": "hi"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "why"},
        {"role": "user", "content": "c"},
    ],
    "calls": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": "weather"},
    ],
    "prefill": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>"}],
    "prefill with blanks": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure: \n"}],
}
LOOP = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
END = "{% if add_generation_prompt %}[assistant]{% endif %}"
TEMPLATES = {
    "plain": LOOP + END,
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>\n"
    "{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}" + END,
    "scope of generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}" + LOOP,
    "tojson": "{% for t in tools or [] %}{{ t | tojson }}{{ t | tojson(indent=2) }}{{ t | tojson(ensure_ascii=True) }}"
    "{{ t | tojson(separators=(',', ':'), sort_keys=True) }}{% endfor %}" + LOOP + END,
    "documents": "{% if documents is none %}none{% endif %}{% if tools is none %}, none{% endif %}\n" + LOOP + END,
    "strips": "{% for m in messages %}{{ m.role }}: {{ m.content | trim if m.content }}</s>{% endfor %}" + END,
    "calls": "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}" + END,
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content }}{% endfor %}" + END,
    "undefined": "{% if pad_token is defined %}pad{% endif %}{{ bos_token }}{{ date }}" + LOOP + END,
    "loops": "{% for m in messages %}{% if loop.index > 5 %}{% break %}{% endif %}{{ m.content }}{% endfor %}" + END,
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1) }}" + END,
    "dates": "{{ strftime_now('%Y') }}" + LOOP + END,
}


def without_null_entries(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as transformers' apply_chat_template gives them to render_jinja_template."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


@pytest.mark.parametrize(
    "source", [LOOP, TEMPLATES["calls"], "{{ messages[1].keys() | list }}{{ messages[0].content }}"]
)
def test_null_content_is_rendered_as_a_tokenizer_does(source: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = source
    expected = tokenizer.apply_chat_template(CHATS["calls"], tokenize=False, add_generation_prompt=True)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    assert ChatTemplate(source, special, "model.path").render(CHATS["calls"]) == expected
    assert "None" not in expected


@each("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, SPECIAL, "model.path")
    for chat, messages in CHATS.items():
        begun = messages[-1]["role"] == "assistant"
        for tools in (None, TOOLS) if "tools" in source else (None,):  # else relaxd refuses tools
            ((expected,), _) = render_jinja_template(
                [without_null_entries(messages)],
                tools=tools,
                chat_template=source,
                add_generation_prompt=not begun,
                continue_final_message=begun,
                **SPECIAL,
            )
            assert ours.render(messages, tools or ()) == expected, (chat, tools)


def test_a_template_of_content_parts_gets_parts() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    assert ChatTemplate(source, {}, "model.path").render(CHATS["system"]) == "S ;hi;"


def test_a_prompt_that_ends_in_an_assistant_message_is_continued_or_refused() -> None:
    template = ChatTemplate(TEMPLATES["plain"], SPECIAL, "model.path")
    assert template.render(CHATS["prefill"]) == "[user] a\n[assistant] <think>"
    with pytest.raises(DataError, match=r"data\.continue_final_message: the prompt ends in a message of the assistant"):
        template.render(CHATS["prefill"], continue_final=False)
    with pytest.raises(DataError, match="without text, which can't continue"):
        template.render(CHATS["calls"][:2])
    changing = ChatTemplate(
        "{% for m in messages %}{{ m.content | upper }}{{ m.content }}{% endfor %}", {}, "model.path"
    )
    assert changing.render(CHATS["prefill"]) == "Aa<THINK>CONTINUE_FINAL_MESSAGE_TAG <think>"
    hiding = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="which the chat template changes, so that the model can't continue it"):
        ChatTemplate(hiding, {}, "model.path").render(CHATS["prefill"])


ADDED = {"0": {"content": "<s>", "special": True}}


@pytest.mark.parametrize(
    ("config", "tokens_map"),
    [
        ({"bos_token": None, "pad_token": "<pad>"}, {"bos_token": {"content": "<map>"}, "eos_token": "</map>"}),
        ({"bos_token": "<config>", "eos_token": "</config>"}, {"bos_token": "<map>", "eos_token": None}),
        ({"bos_token": "<config>"}, {"bos_token": ""}),
        ({"eos_token": "</config>", "added_tokens_decoder": ADDED}, {"bos_token": "<map>", "eos_token": "</map>"}),
        ({"eos_token": {"content": "</config>", "__type": "AddedToken"}}, None),
    ],
)
def test_special_tokens_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], tokens_map: dict[str, Any] | None
) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"} | config))
    if tokens_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens_map))
    assert special_tokens(tmp_path) == AutoTokenizer.from_pretrained(tmp_path).special_tokens_map


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("special_tokens_map.json", "{", r"special_tokens_map\.json can't be read as JSON: Expecting property name"),
        (
            "special_tokens_map.json",
            "[1]",
            r"tokens_map\.json is damaged: it has \[1\] instead of a JSON object",
        ),
        (
            "special_tokens_map.json",
            '{"bos_token": 3}',
            r"tokens_map\.json is damaged: bos_token is 3, but must",
        ),
        ("special_tokens_map.json", '{"eos_token": ["a"]}', r"damaged: eos_token is \[\"a\"\], but must be text"),
        ("special_tokens_map.json", '{"pad_token": {"lstrip": true}}', r"pad_token is {\"lstrip\": true}, but must be"),
        ("tokenizer_config.json", "", r"tokenizer_config\.json can't be read as JSON: Expecting value"),
        ("tokenizer_config.json", '{"bos_token": false}', r"tokenizer_config\.json is damaged: bos_token is false"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be text or a list of"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default"}]}',
            "chat_template must be text or a list of",
        ),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a", "template": 3}]}', "chat_template must be text or"),
    ],
)
def test_a_damaged_file_of_the_tokenizer_is_named_with_its_field(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=complaint) as caught:
        load_chat_template(tmp_path, None)
    assert caught.value.field == "model.path"


def test_prompts_with_tools_get_the_template_for_tools(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"},'
        ' {"name": "tool_use", "template": "{{ tools[0].function.name }}: {{ messages[0].content }}"}]}'
    )
    template = load_chat_template(tmp_path, None)
    assert template is not None
    assert template.render(CHATS["user"]) == "hi é <b>"
    assert template.render(CHATS["user"], TOOLS) == "weather: hi é <b>"


def test_prompts_with_tools_get_the_template_for_tools_of_a_folder_as_transformers_saves_it(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools[0].function.name }}: {{ messages[0].content }}",
    }
    tokenizer.save_pretrained(tmp_path)
    template = load_chat_template(tmp_path, None)
    assert template is not None
    for tools in (None, TOOLS):
        expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            CHATS["user"], tools=tools, tokenize=False
        )
        assert template.render(CHATS["user"], tools or ()) == expected


def test_a_template_is_text_or_the_path_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.jinja"
    file.write_text(TEMPLATES["plain"])
    assert chat_template_text(str(file)) == chat_template_text(TEMPLATES["plain"]) == TEMPLATES["plain"]
    template = load_chat_template(tmp_path, str(file))
    assert template is not None
    assert template.render(CHATS["user"]).startswith("[user] hi")
    with pytest.raises(
        DataError, match=r"model\.chat_template: '\./no\.jinja' has no .* which can't be read: No such file"
    ):
        load_chat_template(tmp_path, "./no.jinja")
    with pytest.raises(DataError, match="doesn't have the messages: it makes 'Hello' of every prompt"):
        load_chat_template(tmp_path, "Hello{% if false %}{% endif %}")
