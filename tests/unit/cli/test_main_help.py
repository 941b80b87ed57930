"""The overview of `relaxd --help`, and addresses that commands refuse."""

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from relaxd.cli.main import HELP, app
from relaxd.client import CliError

WIDTH = 78
"""Columns that a terminal of 80 has for a line of help."""


def test_the_overview_names_commands_that_there_are() -> None:
    lines = [line for line in HELP.splitlines() if line.startswith("  ")]
    named = {found[1] for line in lines if (found := re.match(r"  relaxd ([a-z]+)", line))}
    assert len(named) > 20
    assert named <= set(get_command(app).commands)  # type: ignore[attr-defined]
    assert [line for line in lines if len(line) > WIDTH] == []


@pytest.mark.parametrize("address", ["nope", "host:", ":1", "host:70000", "host:http"])
@pytest.mark.parametrize("command", ["console", "status", "samples"])
def test_an_address_that_is_none_is_named(tmp_path: Path, command: str, address: str) -> None:
    done = CliRunner().invoke(app, [command, "--state", str(tmp_path), "--coordinator", address])
    assert isinstance(done.exception, CliError)
    assert str(done.exception).startswith(f"the coordinator's address is {address!r}: it must be host:port")
