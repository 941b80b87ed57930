"""Each construct of Jinja that chat templates use is rendered, or refused, as transformers does it."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from relaxd.data.templating import ChatTemplate
from relaxd.models import DataError
from tests.kit.cases import each

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "é <b> 'it'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi é <b>\n"}],
    [
        {"role": "system", "content": " Be kind. "},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "3", "name": "weather", "tool_call_id": "1"},
        {"role": "tool", "content": "4"},
    ],
]
LOOP = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
CONSTRUCTS = {
    # Loops
    "loop's variables": "{% for m in messages %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.length }}{{ loop.first }}"
    "{{ loop.last }}{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem is defined }}"
    "{{ loop.cycle('x', 'y') }}{% endfor %}",
    "loop.changed and depth": "{% for m in messages %}{% if loop.changed(m.role) %}{{ loop.depth }}"
    "{% endif %}{% endfor %}",
    "a filtered loop with else": "{% for m in messages if m.role == 'none' %}x{% else %}none{% endfor %}",
    "a recursive loop": "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "break and continue": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{% if m.role == 'tool' %}"
    "{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "unpacking": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% set a, b = 1, 2 %}{{ a + b }}",
    "a loop over slices": "{% for m in messages[1:] %}{{ m.role }}{% endfor %}{{ messages[::-1][0].role }}"
    "{{ messages[-1]['role'] }}",
    "ranges": "{% for i in range(2, 8, 3) %}{{ i }}{% endfor %}{{ range(3) | list }}",
    # Variables
    "a set in a loop is the loop's": "{% set x = 1 %}{% for m in messages %}{% set x = x + 1 %}{% endfor %}{{ x }}",
    "a set in an if is outside, too": "{% if true %}{% set x = 1 %}{% endif %}{{ x }}",
    "a namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.n }}{{ ns.last }}",
    "a namespace of a dict": "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns['b'] }}",
    "a private name in a namespace": "{% set ns = namespace(_a=1) %}x",
    "a private name set in a namespace": "{% set ns = namespace() %}{% set ns._a = 1 %}x",
    "dict()": "{{ dict(a=1, b='é') | tojson }}{{ dict.fromkeys(['a'], 1) }}{{ dict({'x': 2}) }}",
    "methods of dict's type": "{{ dict.items({'a': 1}) }}",
    "with": "{% with x = 1, y = 2 %}{{ x + y }}{% endwith %}{{ x }}",
    "a block of set": "{% set x %}  {{ messages[0].role }}  {% endset %}[{{ x | trim }}]",
    "a filtered block of set": "{% set x | upper | trim %} {{ messages[0].role }} {% endset %}[{{ x }}]",
    "a filter block": "{% filter upper %}{{ messages[0].role }}{% endfilter %}",
    "a macro": "{% macro show(m, end='!', *more, **named) %}{{ m.role }}{{ end }}{{ more }}{{ named }}{% endmacro %}"
    "{{ show(messages[0]) }}{{ show(messages[0], '?', 1, x=2) }}{{ show.name }}",
    "a recursive macro": "{% macro walk(x) %}{% if x is mapping %}{% for k in x %}{{ k }}({{ walk(x[k]) }}"
    "){% endfor %}"
    "{% else %}{{ x }}{% endif %}{% endmacro %}{% for t in tools or [] %}{{ walk(t) }}{% endfor %}",
    "a call block": "{% macro box() %}[{{ caller('x') }}]{% endmacro %}{% call(y) box() %}{{ y }}{% endcall %}",
    "undefined": "{{ nothing }}{{ nothing is defined }}{{ messages[0].nothing }}"
    "{{ messages[0]['nothing'] is undefined }}",
    "an entry of undefined": "{{ nothing.at.all }}",
    "an index beyond the end": "{{ messages[99] }}{{ messages[99].role }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
    "tools and documents": "{{ tools is none }}{{ documents is none }}{{ tools | length if tools }}",
    # Expressions
    "conditions": "{{ 'a' if messages else 'b' }}{{ 'x' if false }}{{ messages and tools and 1 }}{{ not messages }}"
    "{{ none or 'd' }}{{ 'u' in messages[0].role }}{{ 1 < 2 }}",
    "arithmetic": "{{ 7 // 2 }}{{ 7 / 2 }}{{ 7 % 2 }}{{ 2 ** 3 }}{{ 1 + 2 * 3 }}{{ -1 }}{{ 1.5 | round | int }}",
    "joining": "{{ 'a' ~ 1 ~ none }}{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 'ab' * 2 }}{{ '%s-%d' % ('a', 1) }}"
    "{{ '{}-{x}'.format(1, x=2) }}",
    "text's methods": "{{ ' a '.strip() }}{{ 'aab'.lstrip('a') }}{{ 'abb\\n'.rstrip('\\n') }}"
    "{{ 'a,b'.split(',')[-1] }}"
    "{{ 'ab'.startswith('a') }}{{ 'ab'.endswith(('b', 'c')) }}{{ 'ab'.replace('a', 'x') }}{{ 'a b'.title() }}"
    "{{ '-'.join(['a', 'b']) }}{{ 'abc'.find('c') }}{{ 'a\\nb'.splitlines() }}{{ 'abc'[1:] }}"
    "{{ 'abcb'.rsplit('b', 1) }}",
    "thinking": "{% for m in messages %}{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "|{{ m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}{% endif %}"
    "{{ m.reasoning_content if m.reasoning_content is string }}{% endfor %}",
    "dictionaries": "{% set d = {'a': 1, 'b': {'c': none}} %}{{ d.a }}{{ d['b'].c }}{{ d.get('x', 'y') }}"
    "{{ d.keys() | list }}{{ d.values() | list }}{{ d }}",
    # Filters
    "filters of lists": "{{ [3, 1, 2] | sort | join(',') }}{{ [1, 1] | unique | list }}{{ [1, 2] | reverse | list }}"
    "{{ [1, 2] | first }}{{ [1, 2] | last }}{{ [1, 2] | sum }}{{ [[1, 2], [3]] | map('length') | list }}"
    "{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2] | max }}",
    "filters of messages": "{{ messages | map(attribute='role') | join(' ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ (messages | rejectattr('role', 'eq', 'user') | first).role }}"
    "{{ messages | selectattr('tool_calls', 'defined') | list | length }}"
    "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | length }}{% endfor %}",
    "filters of dictionaries": "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1} | items | list }}"
    "{{ {'a': 1} | length }}",
    "filters of text": "{{ ' a ' | trim }}{{ 'a' | upper }}{{ 'a b' | title }}{{ 'aXb' | lower }}"
    "{{ 'ab' | replace('a', 'x') }}"
    "{{ 'a\\nb' | indent(2) }}{{ 'ab' | capitalize }}{{ 1 | string }}{{ 'abc' | list }}{{ '<b>' | escape }}"
    "{{ '<b>' | safe }}{{ 'a b c' | wordcount }}{{ '3' | int + 1 }}{{ '1.5' | float }}{{ 'abcdef' | truncate(3) }}",
    "default": "{{ nothing | default('d') }}{{ '' | default('e', true) }}{{ none | default('f') }}",
    "tojson": "{% for t in tools or [] %}{{ t | tojson }}\n{{ t | tojson(indent=4) }}\n"
    "{{ t.function | tojson(sort_keys=true) }}"
    "{{ t | tojson(separators=(',', ':')) }}{{ t | tojson(ensure_ascii=true) }}{% endfor %}{{ 'é<\\'' | tojson }}"
    "{{ none | tojson }}{{ 1.0 | tojson }}{{ [true, 'a'] | tojson }}",
    "tojson of undefined": "{{ nothing | tojson }}",
    "tool calls": "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% for k, v in c.function.arguments | items %}{{ k }}"
    "{{ v if v is string else v | tojson }}{% endfor %}{{ c.id }}{% endfor %}{% endfor %}",
    # Tests
    "tests": "{{ 'a' is string }}{{ {} is mapping }}{{ [] is iterable }}{{ 'a' is sequence }}{{ 1 is number }}"
    "{{ true is boolean }}{{ none is none }}{{ 1 is not none }}{{ 1 is odd }}{{ true is true }}{{ 1 is integer }}"
    "{{ 1.0 is float }}{{ 'a' is in ['a'] }}{{ 1 is eq 1 }}{{ x is not defined }}{{ range is callable }}"
    "{{ 4 is divisibleby 2 }}",
    # Blanks
    "blanks": "a\n  {%- if true -%}  b  {%- endif %}\n  {% if true %}\n  c\n  {% endif %}\n{{- ' d' -}}  \n"
    "{%+ if true %} e{% endif +%}\n",
    "comments and raw": "a {# no #} b\n{#- none -#}\n{% raw %}{{ x }}{% endraw %}",
    "the last newline": "x\n",
    # Functions
    "a refusal": "{% if messages | length > 1 %}{{ raise_exception('only one message') }}{% endif %}",
    "a date": "{{ strftime_now('%Y') | length }}{% if strftime_now is defined %}x{% endif %}",
    "cycler and joiner": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner() %}"
    "{{ j() }}a{{ j() }}b",
    # Errors
    "a division by zero": "{{ 1 // 0 }}",
    "an index that isn't found": "{{ 'abc'.index('x') }}",
    "a wrong format": "{{ '%d' % 'a' }}",
    "text plus a number": "{{ 'a' + 1 }}",
    "a list that is changed": "{{ [1].append(2) }}",
    "messages that are changed": "{{ messages.clear() }}",
    "entries with names of methods": "{% set d = dict(items=1, x=2, _a=3, mro=4) %}{{ d.items is callable }}"
    "{{ d['items'] }}{{ d.x }}{{ d._a }}{{ d.mro }}{{ d.y is defined }}{{ d.x.y is defined }}"
    "{{ 'a'.index('a') }}{{ ['a'].index('a') }}",
    "a private entry of a dictionary": "{{ {'__class__': 1}.__class__ }}",
    "a dictionary that is changed": "{% set d = {'x': 1} %}{{ d.get('x') }}{{ d.update({}) }}",
    "an attribute of Python's": "{{ ''.__class__.__mro__ }}",
    "a method of text's class": "{{ ''.format_map({}) }}",
    "another template": "{% include 'x' %}",
    "an unknown filter": "{{ 'a' | nofilter }}",
    "an unknown tag": "{% do x %}",
    "a block without an end": "{% if true %}",
    # Generation blocks
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}"
    "{% endif %}{% endfor %}",
    "generation with blanks": "a\n  {%- generation -%}\n  b\n  {%- endgeneration -%}\nc\n{% generation %}\n"
    "d\n{% endgeneration %}\n",
    "a variable set in generation": "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}[{{ x }}]",
    "a variable changed in generation": "{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{{ x }}"
    "{% endgeneration %}{{ x }}",
    "a variable changed in generation and if": "{% set x = 1 %}{% if true %}{% set x = 3 %}{% generation %}{{ x }}"
    "{% endgeneration %}{% endif %}{{ x }}",
    "a namespace changed in generation": "{% set ns = namespace(n=1) %}{% generation %}{% set ns.n = 2 %}"
    "{% endgeneration %}{{ ns.n }}",
    "a loop around generation": "{% for m in messages %}{% set r = m.role %}{% generation %}{{ loop.index }}"
    "{{ r }}{{ m.role }}"
    "{% set r = 'x' %}{% endgeneration %}{{ r }}{% endfor %}",
    "a loop in generation": "{% generation %}{% for m in messages %}{% if loop.index > 1 %}{% break %}"
    "{% endif %}{{ m.role }}"
    "{% endfor %}{% endgeneration %}",
    "break in generation": "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "generation in generation": "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
    "generation in a macro": "{% macro say(x) %}{% generation %}{{ x }}{{ y }}{% endgeneration %}"
    "{% endmacro %}{% set y = 1 %}{{ say('a') }}",
    "a macro in generation": "{% generation %}{% macro say(x) %}{{ x }}{% endmacro %}{{ say('a') }}"
    "{% endgeneration %}{{ say is defined }}",
    "generation in a set": "{% set x %}{% generation %} a {% endgeneration %}{% endset %}[{{ x | trim }}"
    "]{{ x is string }}",
    "generation in a filter": "{% filter upper %}{% generation %}a{{ bos_token }}{% endgeneration %}{% endfilter %}",
    "generation in a call": "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}{% generation %}"
    "a{% endgeneration %}{% endcall %}",
    "caller in generation": "{% macro box() %}{% generation %}{{ caller() }}{% endgeneration %}"
    "{% endmacro %}{% call box() %}a{% endcall %}",
    "an error in generation": "{% generation %}{{ raise_exception('no') }}{% endgeneration %}",
    "generation without an end": "{% generation %}a",
    "generation with words": "{% generation of text %}a{% endgeneration %}",
    "an escape in generation": "{% generation %}{{ '<b>' | escape }}{{ '<b>' }}{% endgeneration %}",
    "an escaping block": "{% autoescape true %}{{ '<b>' }}{% generation %}{{ '<b>' }}{% endgeneration %}"
    "{% endautoescape %}",
}  # fmt: skip
REFUSED = object()


def theirs(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> object:
    try:
        texts, _ = render_jinja_template(
            [[{name: value for name, value in one.items() if value is not None} for one in messages]],
            tools=tools,
            chat_template=source,
            add_generation_prompt=True,
            **SPECIAL,
        )
    except Exception:  # of Jinja, or of Python
        return REFUSED
    return texts[0]


def ours(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> object:
    try:
        return ChatTemplate(source, SPECIAL, "model.path").render(messages, tools or ())
    except DataError:
        return REFUSED


@each("name", CONSTRUCTS)
def test_a_construct_is_rendered_or_refused_as_in_transformers(name: str) -> None:
    source = CONSTRUCTS[name] + LOOP
    for tools in (None, TOOLS) if "tools" in source else (None,):
        for messages in CHATS:
            assert ours(source, messages, tools) == theirs(source, messages, tools)


def test_a_template_remembers_nothing_of_what_it_rendered() -> None:
    source = (
        "{% if messages | length > 1 %}{% set seen = 1 %}{% generation %}{% set inside = 1 %}"
        "{{ raise_exception('no') if messages | length > 3 }}{% endgeneration %}{% endif %}[{{ seen }}{{ inside }}]"
        + LOOP
    )
    template = ChatTemplate(source, SPECIAL, "model.path")
    first = template.render(CHATS[0])
    with pytest.raises(DataError, match=r"the chat template can't render this prompt: no"):
        template.render(CHATS[1])
    assert template.render(CHATS[0]) == first == theirs(source, CHATS[0], None)


def test_refusals_outside_of_jinja_name_the_setting_and_the_problem() -> None:
    for source, problem in (("{{ 1 // 0 }}", "integer"), ("{{ 'abc'.index('x') }}", "substring not found")):
        with pytest.raises(DataError, match=rf"model\.path: the chat template can't render this prompt: .*{problem}"):
            ChatTemplate(source + LOOP, SPECIAL, "model.path").render(CHATS[0])


def test_a_template_that_fails_on_null_content_names_the_message() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", SPECIAL, "model.path")
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    with pytest.raises(DataError, match=r'content is null in message 1 \(assistant\): write ""'):
        template.render([{"role": "user", "content": "hi"}, called, {"role": "tool", "content": "ok"}])
