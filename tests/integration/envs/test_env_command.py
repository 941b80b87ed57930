"""`relaxd env test`, with environments in their hosts."""

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app

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


@pytest.mark.parametrize(
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
    ],
)
def test_what_is_wrong_is_said_by_name(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["env", "test", *words])
    assert result.exit_code != 0
    assert message in str(result.exception)
