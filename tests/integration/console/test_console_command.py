"""`relaxd console`, which serves the page in its own process."""

import subprocess
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from relaxd.cli.stack_commands import console
from relaxd.client import CliError
from tests.kit.ports import free_port
from tests.kit.processes import start_python
from tests.kit.waiting import PATIENCE, wait_until


def test_ending_the_command_ends_the_page(tmp_path: Path) -> None:
    port = free_port()
    words = ("-m", "relaxd.cli", "console", "--coordinator", "127.0.0.1:1", "--port", str(port))
    command = start_python(
        *words, cwd=tmp_path, clean=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_until(lambda: _answers(port), "the page", 30 * PATIENCE)
        command.terminate()
        output, _ = command.communicate(timeout=30 * PATIENCE)
        assert command.returncode == 0, output
        assert "warning: no coordinator answers at 127.0.0.1:1" in output
        assert not _answers(port)
    finally:
        command.kill()


def test_without_services_it_names_the_report(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="none are up here") as caught:
        console(state=tmp_path)
    assert "relaxd report RUN" in caught.value.hint


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except URLError:
        return False
