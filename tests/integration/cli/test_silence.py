"""Commands say only what is known of a coordinator that doesn't answer."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.client import CliError, coordinator_client
from relaxd.local.state_folder import Phase, ServiceState, StackState, StateFolder
from tests.kit.processes import kill, start_python
from tests.kit.run_folders import write_run
from tests.kit.waiting import wait_until

SILENT = """
import socket, time
with socket.socket() as here:
    here.bind(("127.0.0.1", 0))
    here.listen()
    print(here.getsockname()[1], flush=True)
    time.sleep(600)
"""
HOLDER = """
import sys
from pathlib import Path
from services.coordinator.runs.run_files import held_folder
with held_folder(Path(sys.argv[1]), "other-1"):
    print("held", flush=True)
    sys.stdin.read()
"""


class Stack:
    """Services as a state folder has them. Their coordinator is a process that accepts connections, and no more."""

    def __init__(self, folder: StateFolder) -> None:
        self.folder = folder
        self.process = start_python("-c", SILENT, stdout=subprocess.PIPE, text=True)
        self.address = f"127.0.0.1:{self.process.stdout.readline().strip()}"
        self.write()

    def write(self, phase: Phase = "running") -> None:
        """Write the state as the supervisor does, with the coordinator in this phase."""
        service = ServiceState(name="coordinator", role="coordinator", phase=phase, pid=self.process.pid, exit_code=3)
        state = StackState(pid=os.getpid(), started=0, coordinator=self.address, redis="redis://x", services=[service])
        self.folder.write(state)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(coordinator_client, "CALL_SECONDS", 1.0)
    for name in ("RELAXD_STATE", "RELAXD_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    folder = StateFolder(tmp_path / ".relaxd")
    folder.create()
    with folder.locked():
        stack = Stack(folder)
        yield stack
        kill(stack.process)


def refusal(*words: str) -> str:
    error = CliRunner().invoke(app, [*words]).exception
    assert isinstance(error, CliError), error
    return f"{error} try: {error.hint}"


def test_a_coordinator_that_is_silent_stopped_or_gone_is_called_so(stack: Stack) -> None:
    pid = stack.process.pid
    for words in (["why"], ["samples"], ["pause"], ["scale", "rollout=2"]):
        said = refusal(*words)
        assert f"does not answer: its process runs (pid {pid})" in said
        assert "relaxd up" not in said
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    assert f"its process is stopped (pid {pid}) try: kill -CONT {pid} lets it go on" in refusal("why")
    kill(stack.process)
    assert f"its process is gone, and its supervisor (pid {os.getpid()}) starts it again" in refusal("why")
    stack.write(phase="failed")
    assert "it kept dying (exit code 3), and its supervisor gave it up" in refusal("why")


def test_runs_and_status_do_not_call_services_gone_that_only_do_not_answer(stack: Stack) -> None:
    write_run("r", steps=9, done=3)
    for words in (["runs"], ["status"]):
        output = CliRunner().invoke(app, words, env={"COLUMNS": "160"}).output
        assert f"does not answer: its process runs (pid {stack.process.pid})" in output
        assert "interrupted" not in output
        assert "gone" not in output


def test_another_address_is_not_that_of_the_services_here(stack: Stack) -> None:
    with socket.socket() as unused:  # bound, not listening
        unused.bind(("127.0.0.1", 0))
        said = refusal("samples", "--coordinator", f"127.0.0.1:{unused.getsockname()[1]}")
    assert f"it isn't the coordinator of the services here try: that one is at {stack.address}" in said
    said = refusal("samples", "--state", "elsewhere", "--coordinator", stack.address)
    assert f"the coordinator at {stack.address} gave no answer within 1 s: it is stopped, busy or cut off" in said


def test_a_run_that_another_coordinator_works_on_is_not_called_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run("r", steps=9, done=3).resolve()
    process = start_python("-c", HOLDER, str(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        result = CliRunner().invoke(app, ["why"], env={"COLUMNS": "160"})
        assert "it belongs to another coordinator (stack other-1)" in result.stdout
        assert "a coordinator that isn't up here works on it (stack other-1)" in result.stderr
        assert "gone" not in result.output
    finally:
        kill(process)
    assert "its services are gone" in CliRunner().invoke(app, ["why"]).stderr
