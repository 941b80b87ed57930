"""`relaxd up --compose` before a docker that only writes down what it is asked: no engine is needed."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from relaxd.local import compose
from relaxd.local.state_folder import StateFolder

DOCKER = """#!/bin/sh
env >> "$0.env"
echo "$@" >> "$0.words"
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker command, first on PATH."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def variables(docker: Path) -> Mapping[str, str]:
    lines = docker.with_name("docker.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.parametrize("console", [True, False])
def test_a_console_is_left_out_if_none_is_wanted(docker: Path, tmp_path: Path, console: bool) -> None:
    folder = StateFolder(tmp_path / "state")
    up = compose.up(folder, 0, {"reward": 2}, 1.0, lambda text: None, console=console)
    given = variables(docker)
    assert (given["REWARD_REPLICAS"], given.get("CONSOLE_REPLICAS", "1")) == ("2", str(int(console)))
    assert [words.split()[1] for words in docker.with_name("docker.words").read_text().splitlines()] == ["build", "up"]
    found = compose.read(folder)
    assert found == up
    assert up.console == (f"http://127.0.0.1:{given['CONSOLE_PORT']}/" if console else "")


def test_the_containers_file_takes_the_number_of_consoles() -> None:
    services = yaml.safe_load((compose.compose_folder() / "compose.yaml").read_text())["services"]
    assert services["console"]["scale"] == "${CONSOLE_REPLICAS:-1}"
