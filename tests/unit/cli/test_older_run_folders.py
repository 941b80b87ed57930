"""Folders of runs that another version of relaxd made: what is read, and what is refused (docs/versions.md)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from relaxd.cli.main import app
from relaxd.config.load_toml import ConfigError, load_recorded
from relaxd.run_folder import CONFIG, RECORD
from tests.kit.run_folders import write_run

READING = ("metrics", "status", "samples", "why")
"""Commands that read a run's folder."""


def relaxd(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run("old", steps=9, done=7)


def change_settings(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Change the recorded configuration as another version would have written it. Returns it."""
    config = json.loads((folder / CONFIG).read_text())
    change(config)
    text = json.dumps(config)
    (folder / CONFIG).write_text(text)
    (folder / RECORD).write_text(json.dumps({**json.loads((folder / RECORD).read_text()), "config_json": text}))
    return text


@pytest.mark.parametrize("command", READING)
def test_commands_read_a_run_that_lacks_newer_settings(folder: Path, command: str) -> None:
    text = change_settings(folder, lambda config: (config["trainer"].pop("profile"), config.pop("alerts")))
    assert load_recorded(text, "old").trainer.profile.steps == ()
    assert relaxd(command, "old").exit_code == 0


@pytest.mark.parametrize("command", READING)
def test_commands_read_a_run_with_settings_that_are_gone(folder: Path, command: str) -> None:
    change_settings(folder, lambda config: config["trainer"].update(gone=3))
    assert relaxd(command, "old").exit_code == 0


def test_a_run_with_settings_that_are_gone_does_not_go_on(folder: Path) -> None:
    change_settings(folder, lambda config: config["trainer"].update(gone=3))
    error = relaxd("resume", "old").exception
    assert isinstance(error, ConfigError)
    assert "run old was made by a version of relaxd with other settings" in str(error)
    assert "trainer.gone is not a known setting" in str(error)
    assert isinstance(relaxd("trace", "g1", "--run", "old").exception, ConfigError)
