"""Configurations and JSON that no run has: an error within moments that says what is wrong."""

import json
import re
import time
from pathlib import Path

import pytest

from relaxd.config.load_toml import MAX_SETTINGS, ConfigError, load, load_file
from relaxd.data.prompt_files import JsonLines
from relaxd.data.templating import load_chat_template
from relaxd.models import DataError
from relaxd.text import parse_json
from tests.kit.cases import each

SECONDS = 10.0
"""Less than any of these took before; most take a hundredth of a second on a machine with nothing else to do."""
FEW = MAX_SETTINGS - 1
DEEP = "tables or lists that are more than 32 deep"
CASES = {
    "digits": ("a = 1\nrun.steps = " + "9" * 5000, "line 2: has a number of more than 4,300 digits"),
    "fewer-digits": ("run.steps = " + "9" * 4000, "has a number of 13,288 bits, run.steps: whole numbers have 64 bits"),
    "hexadecimal": ("run.steps = 0x" + "f" * 5000, "has a number of 20,000 bits, run.steps"),
    "lists": ("rollout.stop = " + "[" * 100_000 + "]" * 100_000, DEEP),
    "few-lists": ("rollout.stop = " + "[" * 100 + "]" * 100, DEEP),
    "tables": ("rollout.stop = " + "{a=" * 5000 + "1" + "}" * 5000, DEEP),
    "deep-key": ("x = 1\n" + "a." * 100_000 + "b = 1", "line 2: has a key of more than 32 names"),
    "deep-quoted-key": ('"a".' * 500 + "b = 1", "has a key of more than 32 names"),
    "deep-header": ("[" + "a." * 100_000 + "b]", "has a key of more than 32 names"),
    "million": ("\n".join(f"k{number} = 1" for number in range(1_000_000)), "more than 262,144 characters"),
    "many": ("\n".join(f"k{number}=1" for number in range(20_000)), "has 20,000 settings, and may have 10,000"),
    "not-too-many": ("\n".join(f"k{number} = 1" for number in range(FEW)), "the first 50 problems: there are more"),
    "in-a-section": ("[rollout]\n" + "\n".join(f"k{number} = 1" for number in range(FEW)), "there are more"),
    "in-another": ("[actor]\n" + "\n".join(f"lr{number} = 1" for number in range(FEW)), "actor is not a known section"),
    "sets": ("[[eval.sets]]\nname=1\n" * 9000, "there are more"),
    "list": ("rollout.stop_token_ids = [" + "'a'," * 60_000 + "]", "there are more"),
    "long-name": ("x" * 1000 + " = 1", "has a key of 1,000 characters"),
    "long-text": ("algorithm.name = '" + "x" * 200_000 + "'", "is not allowed"),
    "long-line": ("run.steps = 1 " * 18_000, "has 18,000 settings"),
    "long-wrong-line": ("x " * 100_000, "not valid TOML: .{0,400}$"),
}


def refused(text: str, *overrides: str) -> str:
    begun = time.monotonic()
    with pytest.raises(ConfigError) as error:
        load(text, overrides)
    assert time.monotonic() - begun < SECONDS
    assert len(str(error.value)) < 30_000
    return str(error.value)


@each("name", CASES)
def test_what_no_run_has_is_refused_soon(name: str) -> None:
    text, expected = CASES[name]
    assert re.search(expected, refused(text)), refused(text)[:500]


def test_options_have_the_same_limits() -> None:
    assert "--run.steps: has a number of more than 4,300 digits" in refused("", "--run.steps", "9" * 5000)
    assert DEEP in refused("", "--run.steps", "[" * 10_000 + "]" * 10_000)
    assert "has more than 32 names" in refused("", "--" + "a." * 10_000 + "b", "1")


def test_of_a_large_file_only_a_part_is_read(tmp_path: Path) -> None:
    with (tmp_path / "big.toml").open("w") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"big.toml: has more than 262,144 characters"):
        load_file(tmp_path / "big.toml")


def test_limits_leave_room_for_what_runs_have() -> None:
    sources = "\n".join(
        f'[[data.sources]]\nname = "s{n}"\npath = "/data/set-{n}.jsonl"\nweight = 0.5' for n in range(999)
    )
    found = refused(f"{sources}\n[model]\nchat_template = '{{{{ a.b.c.d.e.f }}}}{'=' * 500}{'.' * 500}'")
    assert "may have" not in found
    assert "more than" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "more than 4,300 digits"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_python_refuses_is_an_error_of_json(text: str, message: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=message):
        parse_json(text)


@pytest.mark.parametrize("wrong", ['{"prompt": "a", "b": ' + "[" * 99_999, '{"prompt": ' + "1" * 5000 + "}"])
def test_such_a_row_of_data_is_wrong_as_others_are(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' + wrong + "\n")
    rows = JsonLines(tmp_path / "prompts.jsonl")
    with pytest.raises(ValueError, match=r"^not JSON "):
        rows[1]
    assert list(rows.scan()) == [{"prompt": "a"}, None]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_brace_that_is_missing_at_the_end_of_a_line_is_missing_there(end: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(('{"prompt": "a"' + end).encode())
    with pytest.raises(ValueError, match="at column 15"):
        JsonLines(tmp_path / "prompts.jsonl")[0]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "{", "\xff"])
def test_such_a_file_of_a_model_is_named(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=rf"^model.path: .*{name} can't be read as JSON: "):
        load_chat_template(tmp_path, None)
