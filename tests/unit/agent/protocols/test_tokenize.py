"""Requests for tokens: what is read in them, and what is refused by name."""

from typing import Any

import pytest

from services.agent.chat_requests import BadRequest, SessionMedia
from services.agent.protocols.chat_completions import read_tokenize_request
from tests.kit.cases import each

USER = {"role": "user", "content": "Hello"}


def test_texts_and_messages_are_read() -> None:
    assert read_tokenize_request({"prompt": "Hello", "add_special_tokens": True}, SessionMedia()) == "Hello"
    request = read_tokenize_request({"messages": [USER], "add_generation_prompt": True}, SessionMedia())
    assert request.messages == [USER]


@each(
    ("asked", "param"),
    [
        ({}, "messages"),
        ({"prompt": ["Hello"]}, "prompt"),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi"}]}, "messages"),
        ({"prompt": "Hello", "return_token_strs": True}, "return_token_strs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match=param) as caught:
        read_tokenize_request(asked, SessionMedia())
    assert caught.value.param == param
