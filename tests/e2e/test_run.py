"""Runs from the command line: services die, services stay up for several runs, and Ctrl-C ends everything."""

import fcntl
import json
import os
import re
import signal
import termios

import psutil
import pytest

from relaxd.local.state_folder import StateFolder
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.ports import free_port
from tests.kit.processes import start_python
from tests.kit.reports import read_report
from tests.kit.waiting import wait_until


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_survives_the_death_of_services(workplace: Workplace) -> None:
    first = free_port()
    ports = f"{first}-{first + 20}"
    seldom = ("--weights.interval", "3", "--board.max_staleness", "2", "--weights.ports", ports)
    process = workplace.start("run", "tiny.toml", "--run-id", "deaths", "--run.steps", "40", *seldom)
    state = StateFolder(workplace.folder / ".relaxd")
    assert process.stdout is not None
    output = []
    killed: list[str] = []
    victims = {2: "coordinator", 4: "reward", 6: "rollout", 8: "advantage"}
    for line in process.stdout:
        output.append(line)
        step = re.match(r"step +(\d+)/40", line)
        if step and (name := victims.get(int(step[1]))):
            services = state.read().services
            os.kill(next(s.pid for s in services if s.name == name), signal.SIGKILL)
            killed.append(name)
    assert process.wait(timeout=60) == 0, "".join(output)
    assert killed == ["coordinator", "reward", "rollout", "advantage"]
    folder = workplace.folder / "runs" / "deaths"
    check_books(read_summary(folder), steps=40)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(41))
    assert max(line["staleness_max"] for line in lines[1:]) == 2
    # The steps after the last death take longer than two heartbeats.
    assert max(line.get("engine_busy_share", 0.0) for line in lines) > 0
    supervisor_log = (folder / "logs" / "supervisor.log").read_text()
    for name in killed:
        assert f"restarted {name}" in supervisor_log
    assert "restarted trainer" not in supervisor_log


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_up_run_look_down(workplace: Workplace) -> None:
    code, output = workplace.relaxd("up", "--port", "0", "--reward", "2")
    assert code == 0, output
    code, output = workplace.relaxd("up", "--port", "0")
    assert code == 1
    assert "services are already up" in output

    code, output = workplace.relaxd("run", "tiny.toml", "--run-id", "first", timeout=300)
    assert code == 0, output
    check_books(read_summary(workplace.folder / "runs" / "first"), steps=3)

    code, output = workplace.relaxd("status")
    assert code == 0, output
    for expected in ("reward-1", "reward-2", "trainer", "first", "stopped", "3/3"):
        assert expected in output
    code, output = workplace.relaxd("samples", "first", "--json", "--limit", "3")
    assert code == 0, output
    samples = [json.loads(line) for line in output.splitlines()]
    assert len(samples) == 3
    assert all(sample["step"] in (1, 2, 3) and "What is" in sample["prompt"] for sample in samples)
    code, output = workplace.relaxd("watch", "first")
    assert code == 0, output
    assert "run first is stopped" in output

    report = workplace.folder / "runs" / "first" / "report.html"
    for words in (("first",), (), (str(report.parent),)):  # by id, the newest, a folder
        report.unlink()
        code, output = workplace.relaxd("report", *words)
        assert code == 0, output
        assert "run first: stopped · completed, 3 steps" in output
        assert "forward, backward, optimizer" in output
        assert "generate" in output
        assert read_report(report)["answers"]["results"]["times"]
    code, output = workplace.relaxd("report", "unknown")
    assert (code, "unknown" in output) == (1, True), output

    code, output = workplace.relaxd("run", "tiny.toml", "--run-id", "first")
    assert code == 1
    assert "first" in output
    pids = [service.pid for service in StateFolder(workplace.folder / ".relaxd").read().services]
    code, output = workplace.relaxd("down")
    assert (code, output.splitlines()[-1]) == (0, "down"), output  # before it: what a busy machine waits for
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def take_terminal() -> None:
    """Make standard input the terminal of this session. Not a lambda, because a warm process calls it by its name."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_closed_terminal_stops_everything_and_leaves_a_checkpoint(workplace: Workplace) -> None:
    folder = workplace.folder / "runs" / "long"
    terminal, its_end = os.openpty()
    os.set_blocking(terminal, False)
    process = start_python(
        *("-m", "relaxd.cli", "run", "tiny.toml", "--run-id", "long", "--run.steps", "1000"),
        cwd=workplace.folder,
        environment={"TERM": "xterm"},
        clean=True,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(its_end)
    workplace.processes.append(process)

    output = bytearray()

    def has_trained() -> bool:
        try:
            while part := os.read(terminal, 1 << 16):
                output.extend(part)
        except BlockingIOError:
            pass
        except OSError as error:  # the command has ended
            raise AssertionError(output.decode()) from error
        metrics = folder / "metrics.jsonl"
        return metrics.is_file() and metrics.read_text().count("reward_mean") > 1

    wait_until(has_trained, "two steps", 240)
    pids = [service.pid for service in StateFolder(workplace.folder / ".relaxd").read().services]
    os.close(terminal)
    assert process.wait(timeout=120) == 128 + signal.SIGHUP
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "every service is gone")
    assert list((folder / "checkpoints").glob("step-*/manifest.json"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_stops_everything(workplace: Workplace) -> None:
    process = workplace.start("run", "tiny.toml", "--run-id", "long", "--run.steps", "1000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    code, output = workplace.relaxd("report", "long")
    assert code == 0, output
    assert "run long: running, " in output
    assert read_report(workplace.folder / "runs" / "long" / "report.html")["answers"]["samples"]["samples"]
    assert (workplace.folder / "runs" / "long" / "samples.jsonl").stat().st_size > 0
    pids = [service.pid for service in StateFolder(workplace.folder / ".relaxd").read().services]
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 130, rest
    assert "Traceback" not in rest
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "every service is gone")
    saved = re.search(r"the checkpoint of step (\d+) is on disk", rest)
    assert saved, rest
    checkpoint = workplace.folder / "runs" / "long" / "checkpoints" / f"step-{int(saved[1]):06d}"
    assert (checkpoint / "manifest.json").is_file()
    assert not (checkpoint / "kept").exists()
    # The folder tells everything without the services, and how the run goes on.
    code, output = workplace.relaxd("samples", "--json", "--limit", "1")
    assert (code, output.count("relaxd resume long continues it")) == (0, 1), output
    code, output = workplace.relaxd("logs", "trainer", "--run", "long")
    assert (code, f"checkpoint of step {saved[1]} is on disk" in output) == (0, True), output
