"""A fork of the nursery does what the program would have done that it stands for."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relaxd.process.child import LIFELINE_VARIABLE
from tests.kit.processes import is_alive, kill, start_python
from tests.kit.waiting import wait_until
from tests.warm import programs

NONE = f"there are no nurseries: {programs.COLD} is 1, this isn't Linux, or there are GPUs, which can't be forked"
pytestmark = pytest.mark.skipif(programs.FOLDER not in os.environ, reason=NONE)


@pytest.fixture(scope="module", autouse=True)
def light_nursery() -> None:
    wait_until(lambda: programs._is_ready("light"), "the nursery has imported")


@pytest.fixture
def service() -> "Iterator[subprocess.Popen[str]]":
    process = start_python(
        *("-m", "services.reward", "--port", "0", "--coordinator", "127.0.0.1:9"),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "listening on" in line, line
    yield process
    kill(process)
    process.stdout.close()


@pytest.mark.parametrize("words", [["--version"], ["frobnicate"], ["config", "check", "/no/such/file.toml"]])
def test_output_and_exit_code_are_those_of_a_cold_start(words: list[str]) -> None:
    command = [sys.executable, "-m", "relaxd.cli", *words]
    warm = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert getattr(warm, "_nursery", None), "it isn't a fork"
    output = warm.communicate(timeout=60)
    cold_path = os.environ | {"PYTHONPATH": str(programs.ROOT)}
    cold = subprocess.run(command, env=cold_path, capture_output=True, text=True, timeout=60, check=False)
    assert (*output, warm.returncode) == (cold.stdout, cold.stderr, cold.returncode)


def test_what_tells_a_child_is_what_the_service_gives_it() -> None:
    assert programs.LIFELINE == LIFELINE_VARIABLE


def test_it_looks_like_a_child(service: "subprocess.Popen[str]") -> None:
    assert service.poll() is None
    assert service.pid in {child.pid for child in psutil.Process().children()}
    assert "services.reward" in psutil.Process(service.pid).cmdline()
    assert os.getpgid(service.pid) == os.getsid(service.pid) == service.pid
    assert psutil.Process(service.pid).cwd() == str(programs.ROOT)
    with pytest.raises(subprocess.TimeoutExpired):
        service.wait(0.01)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_its_end_is_reported(service: "subprocess.Popen[str]", sent: int, code: int) -> None:
    os.killpg(service.pid, sent)
    assert service.wait(60) == code
    assert service.poll() == code


STARTS_ONE = """
import os, subprocess, sys
environment = {**os.environ, "RELAXD_CHILD_LIFELINE": "9"} if sys.argv[1] == "child" else None
command = [sys.executable, "-m", "services.reward", "--port", "0", "--coordinator", "127.0.0.1:9"]
process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(process.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["child", "other"])
def test_a_child_of_a_service_ends_with_it_and_other_programs_go_on(kind: str) -> None:
    asker = start_python("-c", STARTS_ONE, kind, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    pid = int(asker.stdout.readline())
    assert is_alive(pid)
    assert {child.pid for child in psutil.Process(asker.pid).children()} == {pid}
    kill(asker)
    if kind == "child":
        wait_until(lambda: not is_alive(pid), "the fork has ended")
    else:
        assert is_alive(pid)
        os.kill(pid, signal.SIGKILL)


SPAWNS = """
import multiprocessing, sys, threading
from tests.warm import programs

def work(number):
    parent = multiprocessing.parent_process()
    print(number, parent.pid, flush=True)
    if number:
        threading.Event().wait()  # until it is killed
    sys.exit(7)

if __name__ == "__main__":
    programs.install_spawning("light")
    spawned = [multiprocessing.get_context("spawn").Process(target=work, args=(number,)) for number in range(2)]
    for process in spawned:
        process.start()
    spawned[0].join(30)
    print("ended", spawned[0].exitcode, spawned[1].is_alive(), flush=True)
    print(spawned[1].pid, flush=True)
    sys.stdin.readline()
"""


def test_processes_of_multiprocessing(tmp_path: Path) -> None:
    """Their exit codes are those that they end with, and they end with the process that started them."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    asker = start_python(str(tmp_path / "spawns.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    lines = [asker.stdout.readline().strip() for _ in range(4)]
    assert set(lines[:3]) == {f"0 {asker.pid}", f"1 {asker.pid}", "ended 7 True"}
    pid = int(lines[3])
    assert psutil.Process(pid).ppid() == asker.pid
    assert "--multiprocessing-fork" in psutil.Process(pid).cmdline()
    kill(asker)
    wait_until(lambda: not is_alive(pid), "the fork has ended")
