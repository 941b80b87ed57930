"""Text from outside that a terminal would obey, or that would pass for lines of a log, wherever some is shown."""

import ast
import asyncio
import io
import json
import logging
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaxd.cli import main as command
from relaxd.cli.output import EscapingConsole
from relaxd.client import CliError
from relaxd.process.child import Child
from relaxd.telemetry.logs import JsonFormatter, TextFormatter, escape, escape_lines
from services.coordinator.state.records import Outcome
from tests.kit.processes import ROOT, python_path, run_python
from tests.kit.run_folders import write_run
from tests.kit.tokenizer import write_tokenizer
from tests.kit.waiting import PATIENCE

FORGED = "2026-01-01T00:00:00.000Z ERROR trainer forged"
EVIL = f"evil\x1b[2J\x1b]0;title\x07\r\x9b31m\x7f\x08\u202e\u2028\n{FORGED}"
RUN = """
model.path = "model"
run.steps = 1
reward.name = "evil_reward.py:score"
data.source = "files"
data.path = "evil.jsonl"
"""
REWARD = f"""
def score(sample):
    print({EVIL!r})
    raise ValueError({EVIL!r})
"""


def assert_harmless(text: str) -> None:
    """Assert that no terminal obeys a text."""
    assert "evil" in text
    assert escape(text, keep="\n\t") == text


def assert_nothing_forged(text: str) -> None:
    """Assert that no terminal obeys a text, and that no line of it is the forged one."""
    assert_harmless(text)
    assert not any(line.startswith(FORGED) for line in text.splitlines())


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with everything evil in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "evil_reward.py").write_text(REWARD)
    prompt = {"prompt": EVIL, "answer": EVIL, EVIL: EVIL, "data_source": EVIL}
    (tmp_path / "evil.jsonl").write_text(json.dumps(prompt) + "\n")
    folder = write_run("r", steps=1, done=1, outcome=Outcome.STOPPED, reason=EVIL)
    answer = {"index": 0, "prompt": EVIL, "answer": EVIL, "response": EVIL, "reward": 0.0, "error": EVIL, "length": 1}
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "step-000000.jsonl").write_text(json.dumps(answer | {"parts": {}}) + "\n")
    sample = {"step": 1, "prompt": EVIL, "response": EVIL, "answer": EVIL, "reward": 0.5, "entry": "9-0"}
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample) + "\n")
    group = {
        "group": "0-000001",
        "index": 1,
        "source": EVIL,
        "fate": "dropped",
        "reason": EVIL,
        "retry": 0,
        "entry": "1-0",
    }
    (folder / "groups.jsonl").write_text(json.dumps(group) + "\n")
    (logs := tmp_path / ".relaxd" / "logs").mkdir(parents=True)
    (logs / "reward.log").write_bytes(EVIL.replace("\n", "\r").encode() + b"\n")
    (logs / "trainer.log").write_bytes(EVIL.replace("\n", "\r").encode() + b"\n")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("samples", "r"),
        ("samples", "r", "--json"),
        ("evaluation", "r"),
        ("evaluation", "r", "--json"),
        ("ledger", "r", "--prompt", "1"),
        ("ledger", "r", "--json"),
        ("logs",),
        ("logs", "reward"),
    ],
    ids=" ".join,
)
def test_commands_show_no_control_characters(workplace: Path, words: tuple[str, ...]) -> None:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(command.app, words, catch_exceptions=False)
    assert_harmless(done.output)
    if words[0] != "evaluation":  # whose columns are folded
        assert_nothing_forged(done.output)


def test_prompts_are_shown_with_their_lines(workplace: Path) -> None:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(command.app, ["data", "run.toml"], catch_exceptions=False)
    before, _, prompt = done.output.partition("<|im_start|>")
    assert_harmless(before)
    assert escape_lines(prompt) == prompt


def test_a_reward_that_is_tried_shows_no_control_characters(workplace: Path) -> None:
    done = run_python("-m", "relaxd.cli", "reward", "test", "run.toml", cwd=workplace)
    assert done.returncode == 1
    assert_harmless(done.stdout)
    assert_harmless(done.stderr)


@pytest.mark.parametrize("error", [CliError(EVIL, EVIL), RuntimeError(EVIL)], ids=["expected", "a bug"])
def test_errors_show_no_control_characters(error: Exception, monkeypatch, capsys) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit):
        command.main()
    shown = capsys.readouterr().err
    assert "evil" in shown
    assert escape_lines(shown) == shown


def test_a_terminal_gets_colours_and_nothing_from_outside() -> None:
    file = io.StringIO()
    console = EscapingConsole(file=file, force_terminal=True, color_system="standard", width=200, highlight=False)
    console.print(EVIL.replace("\n", " "), style="red", markup=False)
    shown = file.getvalue()
    assert shown.startswith("\x1b[31mevil\\u001b[2J")
    assert shown.count("\x1b") == 2


def test_no_text_passes_for_a_record_of_a_log() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("relaxd", logging.ERROR, __file__, 1, "failed: %s", (EVIL,), info)
    text = TextFormatter("reward-1").format(record)
    assert_nothing_forged(text)
    assert f"\n    {FORGED}" in text
    line = JsonFormatter("reward-1").format(record)
    assert_nothing_forged(line)
    assert "\n" not in line
    assert json.loads(line)["message"] == f"failed: {EVIL}"


async def test_what_a_child_prints_is_escaped(capfd) -> None:
    child = await Child.start("tests.unit.cli.test_escaping", [], env={"PYTHONPATH": python_path(ROOT)})
    async with asyncio.timeout(60 * PATIENCE):
        ended = await child.exited
    assert ended.last_lines
    assert all(escape(line) == line for line in ended.last_lines)
    shown = capfd.readouterr().err
    assert escape(shown, keep="\n") == shown


def test_commands_print_through_one_place() -> None:
    found = []
    for path in (ROOT / "relaxd" / "cli").rglob("*.py"):
        if path.name != "output.py":
            for node in ast.walk(ast.parse(path.read_text())):
                made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
                if made or (isinstance(node, ast.Name) and node.id == "print"):
                    found.append(f"{path}: {ast.unparse(node)}")
    assert not found, "show, show_json and new_console escape what they print"


if __name__ == "__main__":
    print(EVIL.replace("\n", " "), flush=True)
    sys.exit()
