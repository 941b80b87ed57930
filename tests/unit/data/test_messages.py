"""Chat messages of rows: which forms mean something, and what is said of the others."""

import json
from typing import Any

import pytest

from relaxd.data.duplicates import keys_of, repeats
from relaxd.data.examples import Example
from relaxd.data.sources.prompt_columns import Columns, read_prompt
from tests.kit.cases import each

USER = {"role": "user", "content": "hi"}


def called(**arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]


@each(
    ("value", "expected"),
    [
        ("hi", "hi"),
        ("[1, 2] is a list. Sort it.", "[1, 2] is a list. Sort it."),
        ("[1, 2]", "[1, 2]"),
        (json.dumps([USER]), [USER]),
        ([{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}], [USER]),
        # Tables give an object every key that any of them has.
        (called(city="Paris", a=None), called(city="Paris")),
        (
            [USER, {"role": "assistant", "tool_calls": [1]}],
            [USER, {"role": "assistant", "tool_calls": [1], "content": None}],
        ),
    ],
)
def test_forms_that_mean_something(value: Any, expected: Any) -> None:
    assert read_prompt("prompt", value) == expected


def test_the_text_of_a_prompt_is_what_the_assistant_is_asked() -> None:
    begun = {"role": "assistant", "content": "<think>"}
    assert Example([USER]).text == Example([USER, begun]).text == Example("hi").text == "hi"
    assert Example([begun]).text == "<think>"


@each(
    ("value", "complaint"),
    [
        ([], '"prompt" must be text or a list of chat messages, not a list without entries'),
        (7, '"prompt" must be text or a list of chat messages, not a number'),
        (["hi"], '"prompt"[0] must look like {"role": "user"'),
        (
            [USER, {"role": "assistant", "content": None}],
            '"prompt"[1].content is null or missing, and there are no tool',
        ),
        ([{"role": "user", "content": 3}], '"prompt"[0].content must be text or a list of parts, not a number'),
        (
            [{"role": "user", "content": [{"type": "file", "file": "a.pdf"}]}],
            '"prompt"[0].content[0] is a part of type "file": there are only text, images, video and sound',
        ),
        ([{"role": "user", "content": b"hi"}], '"prompt"[0] has bytes, which a chat message can\'t have'),
        ([{**USER, "id": b"1"}], '"prompt"[0] has bytes, which a chat message can\'t have'),
        (b"hi", '"prompt" must be text or a list of chat messages, not bytes'),
    ],
)
def test_what_is_no_prompt_is_named(value: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match="prompt") as caught:
        read_prompt("prompt", value)
    assert complaint in str(caught.value)


def test_prompts_that_differ_in_tool_calls_are_different_ones() -> None:
    one, same, other = (Example(called(**arguments)) for arguments in ({"a": 1}, {"a": 1}, {"a": 2}))
    assert repeats(keys_of([one, same])).exact == 1
    assert repeats(keys_of([one, other])).normalised == 0


@each(
    ("value", "answer"),
    [(72.0, "72"), (1e16, "10000000000000000"), (0.5, "0.5"), ([72.0], "72"), ([1.0, 2.5], '["1", "2.5"]'), (7, "7")],
)
def test_whole_numbers_have_no_point(value: Any, answer: str) -> None:
    assert Columns().example({"prompt": "a", "answer": value}, "").answer == answer
