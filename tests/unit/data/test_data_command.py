"""`relaxd data`: what a run will see of its data."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.config.load_toml import ConfigError
from tests.kit.tokenizer import CHATML, write_tokenizer

RUN = """
run.steps = 1
reward.name = "math"
[model]
path = "model"
chat_template = '''{template}'''
[data]
source = "files"
max_prompt_tokens = 60
system_prompt = "Be brief."
[[data.sources]]
path = "sums.jsonl"
name = "sums"
weight = 2
[[data.sources]]
path = "more.csv"
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN.replace("{template}", CHATML))
    rows = [{"prompt": "1 + 1?", "answer": 2, "level": 1}, {"prompt": "[x] " * 99, "level": "a"}, {"prompt": "3?"}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "more.csv").write_text("prompt,answer\nc,3\n")


def test_it_shows_counts_lengths_metadata_and_prompts():
    done = CliRunner().invoke(app, ["data", "run.toml", "--prompts", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[:4] == ["sums", "prompts 3", "in an epoch 6", lines[3]]
    assert lines[3].startswith("tokens shortest ")
    assert 'above 60 1 (an error: see data.overlong = "skip")' in lines
    assert "no answer 2" in lines
    assert "metadata.level 1 a number, 1 text, 1 missing" in lines
    assert "metadata.data_source text" in lines
    assert "sums.jsonl line 1, answer '2':" in lines
    assert "more.csv row 1, answer '3':" in lines
    assert "Be brief." in done.output
    assert "[x]" not in done.output  # only the first prompt of each source


@pytest.mark.parametrize("file", ["sums.jsonl", "more.csv", "sums.jsonl@[0:1]"])
def test_a_file_with_prompts_needs_no_configuration(file):
    words = [
        "data",
        file,
        "--model.path",
        "model",
        "--model.chat_template",
        CHATML,
        "--data.system_prompt",
        "Be brief.",
    ]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert f"prompts {3 if file == 'sums.jsonl' else 1}" in [
        " ".join(line.split()) for line in done.output.splitlines()
    ]
    assert "Be brief." in done.output
    with pytest.raises(
        ConfigError, match=r"model\.path is missing: .* has prompts and no configuration.*--model\.path"
    ):
        CliRunner().invoke(app, ["data", file], catch_exceptions=False)


def test_a_folder_with_prompts_needs_no_configuration():
    Path("train").mkdir()
    Path("more.csv").rename("train/more.csv")
    words = ["data", "train@[0:1]", "--model.path", "model", "--model.chat_template", CHATML]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "train/more.csv row 1, answer '3':" in done.output


def test_wrong_data_are_named():
    with pytest.raises(
        ConfigError, match=r"data\.sources\.0\.path: .*\"q\" is missing \(found: prompt, answer, level\)"
    ):
        CliRunner().invoke(app, ["data", "run.toml", "--data.prompt_key", "q"], catch_exceptions=False)


def test_only_the_first_keys_of_metadata_are_listed(tmp_path):
    row = {"prompt": "1?", **{f"key{index}": index for index in range(1_000)}}
    (tmp_path / "sums.jsonl").write_text(json.dumps(row))
    done = CliRunner().invoke(app, ["data", "sums.jsonl", "--model.path", "model"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert sum(line.startswith("metadata.") for line in lines) == 40
    assert "metadata and 960 more keys" in lines
