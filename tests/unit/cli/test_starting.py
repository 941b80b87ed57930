"""One command at a time starts services in a state folder, and each stack gets its own port."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from relaxd.cli.execute import new_run_id
from relaxd.client import CliError
from relaxd.local.state_folder import StateFolder
from relaxd.process.ports import ReservedPort

RESERVE = "from relaxd.process.ports import ReservedPort; import sys; ReservedPort('127.0.0.1', int(sys.argv[1]))"


def reserve_elsewhere(port: int) -> str:
    """Reserve a port in another process; returns what it said."""
    done = subprocess.run([sys.executable, "-c", RESERVE, str(port)], capture_output=True, text=True, check=False)
    return done.stderr


def test_a_port_is_reserved_by_one_process() -> None:
    with ReservedPort("127.0.0.1") as reserved:
        assert "Address already in use" in reserve_elsewhere(reserved.number)
        with socket.create_server(("127.0.0.1", reserved.number)):  # its own server can listen
            pass
    assert not reserve_elsewhere(reserved.number)


def test_the_second_command_is_told_who_starts_services(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / ".relaxd")
    with folder.starting("relaxd run --run-id one"):
        before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
        told = r"is in use by `relaxd run --run-id one` \(pid \d+, since [0-9:]+\)"
        with pytest.raises(CliError, match=told), StateFolder(folder.path).starting("relaxd up"):
            pass
        assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    with folder.starting("relaxd up"), folder.locked():
        pass
    with folder.locked(), pytest.raises(CliError, match="services are already up"), folder.starting("relaxd up"):
        pass


def test_runs_of_one_second_have_different_ids() -> None:
    ids = {new_run_id("my run") for _ in range(4)}
    assert len(ids) == 4
    assert all(re.fullmatch(r"my-run-\d{8}-\d{6}-[0-9a-f]{4}", one) for one in ids)
