"""The lessons of the tiny models that learn to use a tool, and that play against themselves."""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from relaxd.data.sources.addition_source import addition
from relaxd.data.templating import ChatTemplate
from relaxd.envs.calculator import Calculator
from relaxd.envs.replies import reply_format
from relaxd.tools.text_beginner import CHAT_TEMPLATE, GAME_PROMPT, Games, labels, make, make_player

SUM, ASK = "What is 47 + 38?", "<|user|>What is 47 + 38?<|end|><|assistant|>"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "47 + 38"}}</tool_call><|end|>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("models") / "beginner"
    make(folder, phases=((1, 0.9), (1, 0.1)))
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    assert loaded.chat_template == CHAT_TEMPLATE
    return loaded


@pytest.mark.parametrize(
    ("conversation", "taught"),
    [
        (f"{ASK}85<|end|>", "85<|end|>"),
        (f"<|system|>Tools: calculator<|end|>{ASK}85<|end|>", "85<|end|>"),
        (f"{ASK}{CALL}<|tool|>85<|end|><|assistant|>85<|end|>", f"{CALL}85<|end|>"),
    ],
)
def test_only_what_the_model_says_is_taught(tokenizer: PreTrainedTokenizerBase, conversation: str, taught: str) -> None:
    ids = tokenizer([conversation], return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == conversation
    kept = labels(ids)[0]
    assert tokenizer.decode(kept[kept >= 0]) == taught


def test_prompts_name_the_tools_and_calls_can_be_read(tokenizer: PreTrainedTokenizerBase) -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {}, "model.chat_template")
    form = reply_format(template)
    assert form is not None
    assert form.name == "hermes"
    text = template.render([{"role": "user", "content": SUM}], Calculator.tools)
    assert text == f"<|system|>Tools: calculator<|end|>{ASK}"
    assert [call.arguments for call in form.read(CALL, Calculator.tools).calls] == [{"expression": "47 + 38"}]


def test_numbers_are_tokens_which_have_no_digits_to_add(tokenizer: PreTrainedTokenizerBase) -> None:
    examples, held_out = addition(2)
    assert all(len(tokenizer.encode(one.answer)) == 1 for one in [*examples, *held_out])


GAME = re.compile(
    rf"<\|user\|>{re.escape(GAME_PROMPT)}<\|end\|>"
    r"(<\|user\|>\d+ stones\. Take 1 to \d\.<\|end\|><\|assistant\|>\d<\|end\|>)+"
)


def test_lessons_are_games_with_moves_that_are_allowed() -> None:
    games = Games()
    for _ in range(100):
        text = games.text()
        assert GAME.fullmatch(text)
        for most, move in re.findall(r"Take 1 to (\d)\.<\|end\|><\|assistant\|>(\d)", text):
            assert 1 <= int(move) <= int(most)


def test_a_move_is_one_token(tmp_path: Path) -> None:
    make_player(tmp_path, batches=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert all(len(tokenizer.encode(str(move))) == 1 for move in (1, 2, 3))
