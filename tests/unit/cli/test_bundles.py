"""`relaxd bundle`: what it packs of a run, and that no secret is in it."""

import json
import os
import tarfile
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from relaxd.cli.bundle_command import find_secrets, without_secrets
from relaxd.cli.main import app
from relaxd.cli.run_checkpoints import used_by_replay
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import load
from tests.kit.run_folders import write_run

SECRETS = {
    "toml": 'in "TOML"/4711',
    "url": "in%2FURL-4712",
    "environment": "in-environment-4713",
    "file": "in-file-4714",
    "variable": "in-variable-4715",
    "log": "in-log-4716",
    "short": "s3c",
}
CONFIG = """
run.steps = 3
model.path = "nothing"
data.source = "addition"
[reward]
address = "http://rewards"
address_token = "REWARDS"
settings = { api_key = 'in "TOML"/4711', password = "s3c", server = "https://me:in%2FURL-4712@host/x", depth = 4 }
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose configuration, log and notes have secrets; the environment has others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text(f"{SECRETS['file']}\n")
    for name, value in {
        "WANDB_API_KEY": SECRETS["environment"],
        "REWARDS": SECRETS["variable"],
        "RELAXD_TOKEN_FILE": str(tmp_path / "token"),
    }.items():
        monkeypatch.setenv(name, value)
    notes = (f"tracker: {SECRETS['environment']} was refused", "see https://me:in%2FURL-4712@host/x")
    folder = write_run("run-1", steps=3, done=3, config=load(CONFIG), outcome="COMPLETED", notes=notes)
    (folder / "logs").mkdir()
    lines = [f"line {number}: {secret}" for number, secret in enumerate(SECRETS.values()) if secret != "s3c"]
    lines += [f"connecting to redis://user:{SECRETS['log']}@host:6379/0"]
    del lines[5]  # its value alone is known to nobody
    (folder / "logs" / "trainer.log").write_text("".join(line + "\n" for line in ["old", *lines]))
    (folder / "steps").mkdir()
    save_file({}, folder / "steps" / "step-000002.safetensors", metadata={"plan": "{}"})
    return folder


def test_no_secret_is_in_a_bundle(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bundle", "run-1", "--step", "2", "--lines", "6"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with tarfile.open(tmp_path / "run-1-step-2.tar.gz") as archive:
        content = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}  # type: ignore[union-attr]
    assert content.keys() == {
        *("bundle.json", "config.json", "versions.json", "code.json", "run.json", "metrics.jsonl"),
        *("ledger.jsonl", "groups.jsonl", "samples.jsonl", "logs/trainer.log", "steps/step-000002.safetensors"),
    }
    for name, text in content.items():
        for kind, secret in SECRETS.items():
            assert secret not in text, (name, kind)
            assert json.dumps(secret)[1:-1] not in text, (name, kind)
    config = RunConfig.model_validate_json(content["config.json"])
    assert config.reward.settings == {"api_key": "***", "password": "***", "server": "https://***@host/x", "depth": 4}
    assert config.reward.address_token == "REWARDS", "a variable's name is none"
    assert "tracker: *** was refused" in content["run.json"]
    log = content["logs/trainer.log"].splitlines()
    assert log[-2:] == ["line 4: ***", "connecting to redis://***@host:6379/0"]
    assert len(log) == 6
    assert [json.loads(line)["step"] for line in content["ledger.jsonl"].splitlines()] == [2]
    assert len(content["metrics.jsonl"].splitlines()) == 3
    assert json.loads(content["versions.json"])["packages"]["pydantic"]
    assert json.loads(content["bundle.json"]) == {"run_id": "run-1", "step": 2, "start": None}


def test_a_step_file_with_a_secret_is_refused(run: Path, tmp_path: Path) -> None:
    save_file({}, run / "steps" / "step-000002.safetensors", metadata={"plan": SECRETS["environment"]})
    done = CliRunner().invoke(app, ["bundle", "run-1", "--step", "2"])
    assert isinstance(done.exception, CliError)
    assert "step-000002.safetensors has the value of WANDB_API_KEY, which is a secret" in str(done.exception)
    assert not list(tmp_path.glob("*.tar.gz*"))


def test_steps_without_a_file_are_refused(run: Path) -> None:
    for step, problem in ((3, "has no file of step 3"), (4, "run run-1 has done 3 steps: there is no step 4")):
        done = CliRunner().invoke(app, ["bundle", "run-1", "--step", str(step)])
        assert isinstance(done.exception, CliError)
        assert problem in str(done.exception)


def test_a_bundle_without_weights_says_so(run: Path, tmp_path: Path) -> None:
    CliRunner().invoke(app, ["bundle", "run-1", "--step", "2"], catch_exceptions=False)
    for path, problem in (("run-1-step-2.tar.gz", "has no weights"), ("token", "token is not a bundle")):
        done = CliRunner().invoke(app, ["replay", str(tmp_path / path)])
        assert isinstance(done.exception, CliError)
        assert problem in str(done.exception)


def test_a_bundle_without_a_model_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "odd.tar.gz", "w:gz") as archive:
        for name, content in (("bundle.json", {"run_id": "run-1", "step": 1, "start": 0}), ("config.json", {})):
            (tmp_path / name).write_text(json.dumps(content))
            archive.add(tmp_path / name, name)
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "odd.tar.gz")])
    assert isinstance(done.exception, CliError)
    assert "is not a bundle: its config.json has no 'model'" in str(done.exception)


def test_code_that_a_bundle_names_is_only_run_if_it_is_asked_for(tmp_path: Path) -> None:
    config = load(CONFIG + '[algorithm]\nname = "strangers.code:Algorithm"\n')
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "bundle.json").write_text(json.dumps({"run_id": "run-1", "step": 2, "start": 0}))
    with tarfile.open(tmp_path / "odd.tar.gz", "w:gz") as archive:
        for name in ("bundle.json", "config.json"):
            archive.add(tmp_path / name, name)
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "odd.tar.gz")])
    assert isinstance(done.exception, CliError)
    assert 'algorithm.name = "strangers.code:Algorithm" is code' in str(done.exception)
    used = 'algorithm.name = "strangers.code:Algorithm", a class of this machine\'s own code'
    assert used_by_replay(tmp_path, own_code=True) == f"1 rank, {used}"
    config = load(CONFIG + '[algorithm]\nname = "opd"\n[roles.teacher]\nmodel = "o/t"\nplacement = "trainer"\n')
    (tmp_path / "config.json").write_text(config.model_dump_json())
    used = '1 rank, algorithm.name = "opd", roles.teacher.model = "o/t"'
    assert used_by_replay(tmp_path, own_code=False) == used


def test_a_secret_that_begins_with_another_leaves_no_end(run: Path) -> None:
    secrets = {"abcdef": "A_TOKEN", "abcdefghi": "B_TOKEN"}
    assert without_secrets("abcdefghi abcdef", secrets) == "*** ***"
    assert find_secrets(load(CONFIG), os.environ)["in/URL-4712"] == "reward.settings.server"
