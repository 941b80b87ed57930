"""`relaxd env test`, with environments in their hosts."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.media.sources import data_uri
from tests.kit.cases import each
from tests.kit.vision import encoded, picture, write_vision_model

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
OWN = "tests.integration.envs.conversations:"


def test_a_conversation_is_shown_turn_by_turn() -> None:
    words = ["calculator", "--prompt", "6 times 7?", "--answer", "42", "--reply", f"Well. {CALL}", "--reply", "42"]
    result = CliRunner().invoke(app, ["env", "test", *words])
    assert result.exit_code == 0, result.output
    tool, *lines = result.output.splitlines()
    assert tool.startswith('tool {"name": "calculator"')
    assert lines == [
        "[user] 6 times 7?",
        "[assistant] Well.",
        '{"name": "calculator", "arguments": {"expression": "6 * 7"}}',
        "[tool] 42",
        "turn 1: reward 0",
        "[assistant] 42",
        "turn 2: reward 1, done",
        "reward 1, bad_calls 0, calls 1 (the environment ended it)",
    ]


@each(
    ("words", "message"),
    [
        ([OWN + "WithoutStep"], "has no step"),
        (
            [OWN + "Bad", "--reply", "text reward"],
            "step() returned the reward 'good' (str): it must be",
        ),
        (["calculator", "--settings", "size"], "--settings size: it must be KEY=VALUE"),
        (["calculator", "--settings", "size=3"], "got an unexpected keyword argument 'size'"),
        (["calculator", "--metadata", "[]"], "--metadata is []: it must be a JSON object"),
        (["grpc://127.0.0.1:1", "--settings", "a=1"], "an environment at an address has settings of its own"),
        (["grpc://127.0.0.1:1"], "Connection refused"),
        (["grpc://127.0.0.1:99999"], "'grpc://127.0.0.1:99999' must be the name of a bundled environment"),
        (["calculator", "--promt", "6 times 7?"], "--promt: there is no such option for an environment"),
    ],
)
def test_what_is_wrong_is_said_by_name(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["env", "test", *words])
    assert result.exit_code != 0
    assert message in str(result.exception)


RUN = """
run.steps = 1
model.path = "not-read"
data.source = "addition"
reward.name = "environment"

[agent]
environment = "number_guessing"
settings = { high = 5 }
max_turns = 2
"""


def test_images_of_the_prompt_are_as_in_a_run(tmp_path: Path) -> None:
    write_vision_model(tmp_path / "model")
    row = {"prompt": "<image>What is it?", "images": [data_uri(encoded(picture(70, 130)))]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    (tmp_path / "run.toml").write_text(
        f"""
run.steps = 1
model.path = "{tmp_path / "model"}"
data = {{ source = "files", path = "{tmp_path / "data.jsonl"}", media_keys = {{ image = "images" }} }}
reward.name = "environment"
rollout.engine = "transformers"
agent.environment = "{OWN}Measuring"
"""
    )
    result = CliRunner().invoke(app, ["env", "test", str(tmp_path / "run.toml")])
    assert result.exit_code == 0, result.output + str(result.exception)
    assert "[user] It has 64 x 128 pixels." in result.output


def test_the_environment_of_a_run_talks_about_its_first_prompt(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    words = [str(tmp_path / "run.toml"), "--run.seed", "3", "--reply", "0", "--reply", "9", "--reply", "1"]
    result = CliRunner().invoke(app, ["env", "test", *words])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "[user] What is 94 + 41? Answer with the number only.",
        "[user] I think of a number from 1 to 5. You have 7 guesses.",
        "[assistant] 0",
        "[user] My number is higher than 0.",
        "turn 1: reward 0",
        "[assistant] 9",
        "[user] My number is lower than 9.",
        "turn 2: reward 0",
        "reward 0, guesses 2 (agent.max_turns is 2)",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--agent.environment", "guessing"], """agent.environment = "guessing": did you mean 'number_guessing'?"""),
        (["--agent.settings", "{hig = 5}"], "can't be made with {'hig': 5}"),
        (["--data.source", "sums"], 'data.source = "sums"'),
    ],
)
def test_what_is_wrong_in_a_run_is_said_by_name(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    result = CliRunner().invoke(app, ["env", "test", str(tmp_path / "run.toml"), *words])
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_a_run_without_conversations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.partition("[agent]")[0])
    result = CliRunner().invoke(app, ["env", "test", str(tmp_path / "run.toml")])
    assert "agent.environment is empty, so that the run has no conversations" in str(result.exception)
