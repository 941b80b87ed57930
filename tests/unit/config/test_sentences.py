"""Values that people write by mistake get a sentence of their own, and defaults that follow from others follow."""

from pathlib import Path

import pytest

from relaxd.config.load import ConfigError, load
from relaxd.data.files.opening import open_rows

BASE = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
"""


def test_a_micro_batch_takes_one_sample_unless_it_is_set() -> None:
    assert load(BASE).trainer.micro_batch_tokens == 4096
    long = load(BASE + "rollout.max_new_tokens = 16384")
    assert long.trainer.micro_batch_tokens == 16384 + long.data.max_prompt_tokens
    assert type(long).model_validate_json(long.model_dump_json()) == long
    chosen = load(BASE + "rollout.max_new_tokens = 16384\ntrainer.micro_batch_tokens = 8000")
    assert chosen.trainer.micro_batch_tokens == 8000  # which `config check` refuses


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('rollout.stop = "text"', 'rollout.stop = "text": must be a list, such as ["text"]'),
        ("rollout.stop_token_ids = 3", "rollout.stop_token_ids = 3: must be a list, such as [3]"),
        ('data.path = ["a", "b"]', "must be one path, in quotes; several files are a folder, or [[data.sources]]"),
    ],
)
def test_what_is_no_list_or_no_path_is_named(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE + line)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n'), ("a.json", '[{"prompt": "a"}, {"prompt": "b"}]')],
)
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = open_rows(path, "data.path")
    assert [rows[index]["prompt"] for index in range(len(rows))] == ["a", "b"]
