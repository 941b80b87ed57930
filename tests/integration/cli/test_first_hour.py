"""A task of one's own, before any service starts: `relaxd init`, `config`, `reward test`, and what `run` refuses."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relaxd.cli.main import app
from relaxd.config.load_toml import ConfigError, load_file

REWARD = """\
import os


def score(sample):
    return {"reward": float(sample.response == sample.answer), "parts": {"secret": "HF_TOKEN" in os.environ}}


async def later(sample):
    return sample.response == sample.answer


def careless(sample):
    return 1 / len(sample.response)


def broken(sample):
    return sample.response / 2


def two(prompt, answer):
    return 1.0


def nothing(sample):
    return float("nan")
"""


@pytest.fixture
def task(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with what `relaxd init` writes, but for a tiny model and other rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RELAXD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert CliRunner().invoke(app, ["init"]).exit_code == 0
    toml = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(toml.replace('"smollm2-135m"', f'"{tiny_model}"'))
    (tmp_path / "rewards.py").write_text(REWARD)
    yield tmp_path
    assert not (tmp_path / "state").exists()  # no service was started


def relaxd(*words: str) -> Result:
    return CliRunner().invoke(app, [*words], env={"COLUMNS": "200"})


def refusal(*words: str) -> str:
    error = relaxd(*words).exception
    assert isinstance(error, ConfigError)
    return str(error)


def test_what_init_writes_is_a_run(task: Path) -> None:
    assert sorted(path.name for path in task.iterdir()) == ["prompts.jsonl", "reward.py", "rewards.py", "run.toml"]
    assert relaxd("config", "check", "run.toml").output.startswith("run.toml is valid, ")
    tried = relaxd("reward", "test", "run.toml")
    assert tried.exit_code == 0
    for expected in ('opposite of "hot"?', "cold (reference)", "I don't know.", "(empty)", "accuracy 1, brief 1"):
        assert expected in tried.output
    assert tried.output.count("(reference)") == 3

    before = (task / "run.toml").read_text()
    again = relaxd("init")
    assert str(again.exception).startswith("run.toml and prompts.jsonl and reward.py exist already")
    assert (task / "run.toml").read_text() == before
    assert "cd 'other task'" in relaxd("init", "other task").output
    assert load_file(task / "other task" / "run.toml").reward.name == "reward:score"


@pytest.mark.night
def test_a_reward_is_tried_on_answers_of_the_model(task: Path) -> None:
    words = ("run.toml", "--generate", "2", "--rollout.max_new_tokens", "6", "--reward.name", "rewards:score")
    tried, before = relaxd("reward", "test", *words), relaxd("reward", "test", "run.toml")
    assert tried.exit_code == 0, tried.output
    assert tried.output.count(" 0.0") > before.output.count(" 0.0")
    template = "{{ messages[0].content if enable_thinking is defined else raise_exception('no argument') }}"
    words += ("--model.chat_template", template)
    assert "no argument" in refusal("reward", "test", *words)
    given = ("--model.chat_template_arguments", "{ enable_thinking = false }")
    assert relaxd("reward", "test", *words, *given).exit_code == 0
    missing = refusal("reward", "test", "run.toml", "--generate", "1", "--model.path", "no-such")
    assert "model.path: 'no-such' is neither a folder, nor a fetched model" in missing


def test_config_show_explains_and_diff_shows_changes(task: Path) -> None:
    shown = relaxd("config", "show", "run.toml", "--run.steps", "3").output
    assert "# Number of steps, each of which makes one version of the weights.\nsteps = 3\n" in shown
    assert "# eval_path is not set\n" in shown
    diff = relaxd("config", "show", "run.toml", "--run.steps", "3", "--diff").output
    assert "steps = 3\n" in diff
    assert "max_new_tokens = 16  # default: 256\n" in diff
    assert "temperature" not in diff


def test_a_reward_is_tried_with_its_traceback_and_without_secrets(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret 0" in relaxd("reward", "test", "run.toml", "--reward.name", "rewards:score").output
    named = ("--reward.name", "rewards:score", "--reward.environment", '["HF_TOKEN"]')
    assert "secret 1" in relaxd("reward", "test", "run.toml", *named).output
    assert relaxd("reward", "test", "run.toml", "--reward.name", "rewards:later").exit_code == 0

    careless = relaxd("reward", "test", "run.toml", "--reward.name", "rewards:careless")
    assert careless.exit_code == 1
    assert "ZeroDivisionError: division by zero (rewards.py:13, in careless)" in careless.output
    assert f'File "{task / "rewards.py"}", line 13, in careless\n    return 1 / len(sample.response)' in careless.output
    assert careless.output.count("Traceback") == 1
    assert "failed" in careless.output
    assert "the reference answer gets no higher reward than a made-up one" not in careless.output

    missing = relaxd("reward", "test", "run.toml", "--data.path", "none.jsonl").exception
    assert "data.path: can't read none.jsonl" in str(missing)


def test_a_reward_that_hangs_is_killed_and_its_end_is_no_error_of_ours(
    task: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (task / "hanging.py").write_text("def hang(sample):\n    while True:\n        pass\n")
    named = ("--reward.name", "hanging:hang", "--reward.timeout_seconds", "1")
    tried = relaxd("reward", "test", "run.toml", *named).output
    assert "scoring a sample took longer than 1 s (at hanging.py:" in tried
    assert tried.count("failed") == 2
    assert "not tried, because the reward took too long for samples before it" in tried
    printed = capfd.readouterr().err
    assert "it is here (most recent call first)" in printed
    assert not re.search("Task was destroyed|never retrieved|asynchronous generator", printed), printed


def test_check_and_run_refuse_a_reward_that_does_not_work(task: Path) -> None:
    named = ("run.toml", "--reward.name")
    assert "module rewart cannot be imported: ModuleNotFoundError" in refusal("config", "check", *named, "rewart:score")
    assert "; did you mean rewards? modules are looked for in" in refusal("config", "check", *named, "rewrads:score")
    assert "rewards has no scor; did you mean score" in refusal("run", *named, "rewards:scor")
    assert "nothing (rewards.py:24): the reward is nan: it must be finite" in refusal("run", *named, "rewards:nothing")
    two = refusal("config", "check", *named, "rewards:two")
    assert two.startswith("two (rewards.py:20) takes (prompt, answer), but a reward takes one sample: def two(sample)")
    broken = refusal("config", "check", *named, "rewards:broken")
    assert broken.startswith("reward.name = \"rewards:broken\" failed for the answer 'cold': Traceback:")
    assert 'rewards.py", line 17, in broken' in broken
    assert broken.endswith("TypeError: unsupported operand type(s) for /: 'str' and 'int'")
    no_key = refusal("run", "run.toml", "--reward.environment", '["NO_KEY"]')
    assert "reward.environment names NO_KEY, not set" in no_key


def test_check_says_what_would_be_right(task: Path) -> None:
    warmup = refusal("config", "check", "run.toml", "--run.steps", "3", "--trainer.optimizer.warmup_steps", "5")
    assert "trainer.optimizer.warmup_steps = 5: set it to at most 2, run.steps less one" in warmup
    (task / "no_model").mkdir()
    (problem,) = refusal("config", "check", "run.toml", "--model.path", "no_model").splitlines()
    assert problem.endswith("no_model' is no model folder: it has no config.json")


def test_check_refuses_what_this_machine_cannot_run(task: Path) -> None:
    gpus = refusal("config", "check", "run.toml", "--weights.transport", "nccl", "--rollout.engine", "sglang")
    assert 'weights.transport = "nccl" needs GPUs, and this machine shows none: use "gloo"' in gpus
    assert 'rollout.engine = "sglang" needs GPUs, and this machine shows none: use "transformers"' in gpus
    assert "eval.interval is 5, but eval.prompts is 0" in refusal("config", "check", "run.toml", "--eval.interval", "5")
