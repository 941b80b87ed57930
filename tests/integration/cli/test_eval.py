"""`relaxd eval`: a tiny model on sets, without services."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.client import CliError
from relaxd.config.load_toml import ConfigError, load_file
from relaxd.data.dataset import load_data

CONFIG = """
run.steps = 1
model.path = "nothing"
data.source = "addition"
reward.name = "addition"
rollout.max_new_tokens = 6
rollout.max_running_samples = 16
rollout.min_new_tokens = 6
[eval]
prompts = 3
[[eval.sets]]
name = "letters"
path = "letters.jsonl"
samples_per_prompt = 4
reward = "length.py:short"
reward_settings = { divisor = 2 }
[[eval.sets]]
name = "words"
task = "spell_backward"
prompts = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    Path("letters.jsonl").write_text("".join(json.dumps({"prompt": f"Say {c}", "answer": c}) + "\n" for c in "abcde"))
    Path("length.py").write_text("def short(sample, divisor):\n    return float(len(sample.response) % divisor)\n")
    return tmp_path


def run(*words: str, file: str = "run.toml") -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["eval", file, *words])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.night
def test_a_model_is_evaluated_on_sets_without_services(folder: Path, tiny_model: Path) -> None:
    text = run("--model", str(tiny_model), "--out", "found", "--set", "letters", "--set", "words")
    assert "letters: 5 prompts, 4 answers each" in text
    table = [line.split() for line in text.splitlines() if line.startswith(("held_out  ", "letters  ", "words  "))]
    prompts = [row[:4] for row in table if row[2] == "prompts"]
    assert prompts == [["letters", "0", "prompts", "5"], ["words", "0", "prompts", "2"]]
    lines = [json.loads(line) for line in Path("found/letters.jsonl").read_text().splitlines()]
    assert sorted((line["index"], line["sample"]) for line in lines) == [(i, n) for i in range(5) for n in range(4)]
    assert {line["length"] for line in lines} == {6}
    results = json.loads(Path("found/results.json").read_text())
    rewards = [line["reward"] for line in lines]
    assert results["eval/letters/reward"] == results["eval/letters/pass_at_1"] == sum(rewards) / 20
    assert {0.0, 1.0} == set(rewards)
    assert not any(line["error"] for line in lines)
    with pytest.raises(CliError, match="found has the results of an earlier evaluation"):
        run("--model", str(tiny_model), "--out", "found")


@pytest.mark.night
def test_training_prompts_are_answered_as_the_run_samples_them(folder: Path, tiny_model: Path) -> None:
    words = ("--model", str(tiny_model), "--rollout.samples_per_prompt", "5", "--training", "3", "--out", "rollouts")
    assert "training: 3 prompts, 5 answers each" in run(*words)
    assert sorted(path.name for path in Path("rollouts").iterdir()) == ["results.json", "training.jsonl"]
    lines = [json.loads(line) for line in Path("rollouts/training.jsonl").read_text().splitlines()]
    assert sorted((line["index"], line["sample"]) for line in lines) == [(i, n) for i in range(3) for n in range(5)]
    prompts = {line["index"]: (line["prompt"], line["answer"]) for line in lines}
    train = load_data(load_file(Path("run.toml"), ["--model.path", str(tiny_model)])).train
    assert prompts == {index: (train.prompt(index).text, train.prompt(index).answer) for index in range(3)}
    assert len({line["response"] for line in lines}) > 10  # sampled, not greedy


def test_sets_and_training_prompts_exclude_each_other(folder: Path) -> None:
    with pytest.raises(CliError, match="--set and --training exclude each other"):
        run("--set", "letters", "--training", "2")


def test_what_cannot_be_evaluated_is_said_before(folder: Path, tiny_model: Path) -> None:
    model = ("--model", str(tiny_model))
    with pytest.raises(CliError, match="there is no evaluation set 'lettres'; did you mean 'letters'"):
        run(*model, "--set", "lettres")
    Path("run.toml").write_text(CONFIG.replace('"length.py:short"', '"exact_macht"').replace("prompts = 2", "k = [2]"))
    with pytest.raises(ConfigError, match=r"'words' has k = 2: it must be 1 to samples_per_prompt = 1"):
        run(*model)
    Path("run.toml").write_text(CONFIG.replace('"length.py:short"', '"exact_macht"\nprompts = 9'))
    with pytest.raises(ConfigError) as caught:
        run(*model)
    assert [problem.setting for problem in caught.value.problems] == ["eval.sets.0.prompts", "eval.sets.0.reward"]
    Path("run.toml").write_text(CONFIG.replace("letters.jsonl", "lettres.jsonl"))
    with pytest.raises(ConfigError, match=r"eval\.sets\.0\.path.*lettres\.jsonl"):
        run(*model)
    Path("run.toml").write_text(CONFIG + '[agent]\nenvironment = "calculator"\n')
    with pytest.raises(CliError, match=r'agent.environment is "calculator", but relaxd eval has no environments'):
        run(*model)
    Path("run.toml").write_text(CONFIG.replace('"spell_backward"', '"spel_backward"'))
    with pytest.raises(ConfigError, match=r"eval\.sets\.1\.task.*spell_backward"):
        run(*model)


@pytest.mark.slow
def test_a_file_with_prompts_is_a_set(folder: Path, tiny_model: Path) -> None:
    pq.write_table(pa.table({"question": ["2 + 2", "3 + 3", "4 + 4"], "answer": [4, 6, 8]}), "Sums of two.parquet")
    words = (
        "--model TINY --out found --data.prompt_key question --reward.name length.py:short --rollout.max_new_tokens 4"
    )
    words += " --reward.settings {divisor=2} --eval.sets.0.samples_per_prompt 2"
    text = run(*words.replace("TINY", str(tiny_model)).split(), file="Sums of two.parquet@[:2]")
    assert "sums-of-two: 2 prompts, 2 answers each" in text
    lines = [json.loads(line) for line in Path("found/sums-of-two.jsonl").read_text().splitlines()]
    assert sorted((line["prompt"], line["answer"]) for line in lines) == 2 * [("2 + 2", "4")] + 2 * [("3 + 3", "6")]
    results = json.loads(Path("found/results.json").read_text())
    assert results["model"] == str(tiny_model)
    assert results["eval/sums-of-two/reward"] == sum(line["reward"] for line in lines) / 4


def test_what_a_file_with_prompts_lacks_is_said(folder: Path, tiny_model: Path) -> None:
    model = ("--model", str(tiny_model))
    with pytest.raises(ConfigError, match=r"reward\.name is missing: the name of a reward"):
        run(*model, file="letters.jsonl")
    with pytest.raises(ConfigError, match=r"model\.path is missing: letters\.jsonl has prompts"):
        run("--reward.name", "addition", file="letters.jsonl")
    with pytest.raises(ConfigError, match=r"eval\.sets\.0\.path.*can't read lettres\.jsonl"):
        run(*model, "--reward.name", "addition", file="lettres.jsonl")
    with pytest.raises(CliError, match=r"letters\.txt is neither a configuration \(\.toml\) nor a file with prompts"):
        run(*model, file="letters.txt")
