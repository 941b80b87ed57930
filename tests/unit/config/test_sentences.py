"""Values that people write by mistake get a sentence of their own, and defaults that follow from others follow."""

from pathlib import Path

import pytest

from relaxd.config.load_toml import ConfigError, Problem, load
from relaxd.config.write_toml import dump, dump_explained
from relaxd.data.prompt_files import open_rows
from relaxd.models import DataError

BASE = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
"""


def test_names_of_settings_have_a_colon_unless_the_message_goes_on() -> None:
    for message, shown in (
        (
            "can't read a.jsonl: it is neither a file nor a folder",
            "data.path: can't read a.jsonl: it is neither a file",
        ),
        ("rows.jsonl line 1 has no tokens", "data.path: rows.jsonl line 1 has no tokens"),
        ("= 7: it must be text", "data.path = 7: it must be text"),
        ("is missing: the file", "data.path is missing: the file"),
    ):
        assert str(DataError("data.path", message)) == str(Problem("data.path", message))
        assert str(Problem("data.path", message)).startswith(shown)
    assert str(Problem("", "is wrong", "--a")) == "--a: is wrong"


def test_a_micro_batch_takes_one_sample_unless_it_is_set() -> None:
    assert load(BASE).micro_batch_tokens == 4096
    long = load(BASE + "rollout.max_new_tokens = 16384")
    assert long.micro_batch_tokens == 16384 + long.data.max_prompt_tokens
    chosen = load(BASE + "rollout.max_new_tokens = 16384\ntrainer.micro_batch_tokens = 8000")
    assert chosen.micro_batch_tokens == 8000  # which `config check` refuses


def test_a_derived_micro_batch_follows_the_lengths_wherever_the_configuration_went() -> None:
    long = load(BASE + "rollout.max_new_tokens = 16384")
    shown, sent = dump_explained(long), dump(long)
    assert f"micro_batch_tokens = 0  # {long.micro_batch_tokens} in this run" in shown.splitlines()
    for text in (shown, sent):
        shorter = load(text, ["--rollout.max_new_tokens", "8192"])
        assert shorter.micro_batch_tokens == 8192 + long.data.max_prompt_tokens
    stored = type(long).model_validate_json(long.model_dump_json())
    assert stored == long
    shorter = stored.model_copy(update={"rollout": stored.rollout.model_copy(update={"max_new_tokens": 100})})
    assert shorter.micro_batch_tokens == 4096
    assert "micro_batch_tokens = 99999" in dump_explained(load(BASE + "trainer.micro_batch_tokens = 99999"))


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


def test_a_list_of_paths_on_the_command_line_is_named() -> None:
    path = load(BASE.replace('"addition"', '"files"', 1), ["--data.path", '["a", "b"]']).data.path
    assert path is not None
    with pytest.raises(DataError, match=r"it is one path: several files are a folder, or \[\[data\.sources\]\]"):
        open_rows(path, "data.path")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n'), ("a.json", '[{"prompt": "a"}, {"prompt": "b"}]')],
)
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = open_rows(path, "data.path")
    assert [rows[index]["prompt"] for index in range(len(rows))] == ["a", "b"]
