"""The lessons of the tiny model that plays against itself."""

import re
from pathlib import Path

from transformers import AutoTokenizer

from relaxd.tools.game_beginner import PROMPT, Games, make

GAME = re.compile(
    rf"<\|user\|>{re.escape(PROMPT)}<\|end\|>"
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
    make(tmp_path, batches=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert all(len(tokenizer.encode(str(move))) == 1 for move in (1, 2, 3))
