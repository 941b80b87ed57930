"""Bundled environments with larger tools: the Python sandbox, the search engine, and tasks of reasoning-gym."""

import json
from pathlib import Path
from typing import Any

import pytest

from relaxd.data.sources.reasoning_gym_source import KEY, make_task
from relaxd.envs.environment import Reply, Sample, Step, ToolCall
from relaxd.envs.python_sandbox import PythonSandbox
from relaxd.envs.reasoning_gym_hints import ReasoningGymHints
from relaxd.envs.search import Bm25, Search


@pytest.fixture(scope="module")
def sandbox() -> PythonSandbox:
    return PythonSandbox(seconds=0.5, memory_mb=256, max_chars=300)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)", "42\n"),
        ("x = 42", "[it printed nothing]"),
        ("import sys\nprint('a')\nprint('b', file=sys.stderr)\nsys.exit(3)", "a\nb\n"),
        (
            "print('a')\n1 / 0",
            'a\nTraceback (most recent call last):\n  File "<answer>", line 2, in <module>\n'
            "ZeroDivisionError: division by zero\n",
        ),
        ("def f(:", '  File "<answer>", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'),
        ("print('x' * 400)", f"{'x' * 150}\n[101 characters left out]\n{'x' * 149}\n"),
        (
            "print('a' * 3_000_000)",
            f"{'a' * 150}\n[1048276 characters left out]\n{'a' * 150}\n[it ended with exit code 1]",
        ),
        ("import os\nprint('a')\nos._exit(3)", "a\n\n[it ended with exit code 3]"),
    ],
)
def test_a_program_returns_what_it_prints(sandbox: PythonSandbox, code: str, printed: str) -> None:
    assert sandbox.run_python(code) == printed


def test_a_program_cannot_take_long_or_much_or_leave_its_enclosure(sandbox: PythonSandbox) -> None:
    slow = sandbox.run_python("print('begun')\nwhile True: pass")
    assert slow in ("begun\n\n[it computed for longer than 0.5 s]", "begun\n\n[it did not end in time]")
    for code, error in {
        "x = 'a' * 10**9": "MemoryError",
        "open('/etc/passwd')": "PermissionError",
        "import socket; socket.create_connection(('127.0.0.1', 1))": "PermissionError",
    }.items():
        assert error in sandbox.run_python(code)


def test_a_conversation_with_the_sandbox_ends_with_the_answer() -> None:
    environment = PythonSandbox()
    environment.open(Sample([], "42"))
    calls = [ToolCall("run_python", {"code": f"print({one})"}, id=one) for one in ("6 * 7", "1")]
    step: Any = environment.step(Reply("", [*calls, ToolCall("run_python", {}, id="c")]))
    assert [one["content"] for one in step.observation][:2] == ["42\n", "1\n"]
    assert step.observation[2]["content"] == "Error: run_python: code: Field required"
    assert environment.step(Reply("It is 42.")) == Step(None, 1.0, True, {"calls": 3.0, "errors": 1.0})
    assert environment.step(Reply("It is 43.")).reward == 0.0  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="seconds is 0: it must be above 0"):
        PythonSandbox(seconds=0)


def test_scores_are_those_of_the_formula() -> None:
    documents = ["the cat sat", "a dog and a cat and a bird", "birds"]
    # idf(cat) = ln(1 + 1.5 / 2.5); the lengths are 3, 8 and 1, their mean is 4.
    index = Bm25(documents)
    numbers, scores = index._postings["cat"]
    assert numbers.tolist() == [0, 1]
    assert scores.tolist() == pytest.approx([0.470004 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * n / 4)) for n in (3, 8)])
    assert index.best("a CAT, please", 3) == [documents[1], documents[0]]
    assert index.best("horse", 3) == []


def corpus(folder: Path, *rows: object) -> str:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_model_finds_documents_of_a_file(tmp_path: Path) -> None:
    path = corpus(
        tmp_path, {"title": "Paris", "text": "the capital of France"}, {"text": "Rome is the capital of Italy"}
    )
    environment = Search(path, results=1, max_chars=20)
    assert environment.search("capital of France?") == "[1] Paris\nthe capital of"
    assert environment.search("Oslo") == "No document has any of these words."
    assert environment.tools[0]["function"]["parameters"]["required"] == ["query"]
    assert environment.step(Reply("Paris")) == Step(None, 0.0, True, {"calls": 0.0, "errors": 0.0})


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "agent.settings.corpus: .*corpus.jsonl is empty"),
        ([{"text": "a"}, {"body": "b"}], {}, "line 2 has no text in 'text'"),
        ([{"text": "a"}], {"results": 0}, "results is 0: it must be at least 1"),
    ],
)
def test_a_corpus_that_cannot_be_searched_is_refused(
    tmp_path: Path, rows: list[Any], settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Search(corpus(tmp_path, *rows), **settings)


ITEM = {"task": "chain_sum", "settings": {}, "size": 3, "seed": 1, "index": 0}
"""4 - 1 - 7 = -4"""


@pytest.mark.parametrize(
    ("settings", "answers", "said", "reward"),
    [
        ({}, ["-4"], [None], 1.0),
        ({}, ["4", "-4"], ["That is not right: it scores 0 of 1. Answer again.", None], 1.0),
        ({"tries": 2, "discount": 0.5, "hint": "none"}, ["4", "-4"], ["That is not right. Answer again.", None], 0.5),
        ({"tries": 1}, ["4"], [None], 0.0),
        (
            {"tries": 2, "hint": "beginning"},
            ["4", "5"],
            ["That is not right. The answer begins with '-'. Answer again.", None],
            0.0,
        ),
    ],
)
def test_a_wrong_answer_gets_a_hint_until_the_tries_are_used(
    settings: dict[str, Any], answers: list[str], said: list[str | None], reward: float
) -> None:
    pytest.importorskip("reasoning_gym", reason="needs the extra reasoning")
    environment = ReasoningGymHints(**settings)
    environment.open(Sample([], make_task("chain_sum", {}, 3, 1)[0]["answer"], {KEY: ITEM}))
    steps = [environment.step(Reply(answer)) for answer in answers]
    assert [step.observation for step in steps] == said
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1].reward == reward
    first = 1.0 if answers[0] == "-4" else 0.0
    assert steps[-1].info == {"tries": float(len(answers)), "first_score": first}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tries": 0}, "tries is 0: it must be at least 1"),
        ({"hint": "all"}, "hint is 'all': it must be"),
        ({"discount": 2}, "discount is 2: it must be from 0 to 1"),
        ({}, 'the prompt has no "reasoning_gym" in its metadata'),
    ],
)
def test_settings_and_prompts_without_a_task_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningGymHints(**settings).open(Sample([]))
