"""The supervisor, as the process it really is, over small real child processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from relaxd.local.embedded_redis import server_command, url, wait_until_up
from relaxd.local.state_folder import ServiceState, StackState, StateFolder
from relaxd.local.supervisor import ServiceSpec, StackPlan
from relaxd.process.ports import free_port
from tests.kit.processes import is_alive, kill, run_python, start_python
from tests.kit.redis.redis_server import await_append_only_file
from tests.kit.waiting import wait_until

FAST = {"grace_seconds": 5.0, "first_backoff_seconds": 0.05}
SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
WITH_CHILD = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); time.sleep(600)"
TIDY = """
import signal, sys, time
def stop(*_):
    print(f"stopped {time.monotonic()}", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(600)
"""


class Harness:
    def __init__(self, folder: Path) -> None:
        self.folder = StateFolder(folder)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, services: dict[str, str], **options: object) -> None:
        self.folder.create()
        specs = [
            ServiceSpec(name=name, role=name.split("-")[0], command=[sys.executable, "-c", code])
            for name, code in services.items()
        ]
        options = FAST | options
        self.run(StackPlan(state_folder=self.folder.path, coordinator="-", redis="-", services=specs, **options))

    def run(self, plan: StackPlan) -> None:
        self.folder.plan.write_text(plan.model_dump_json())
        words, log = ("-m", "relaxd.local.supervisor", str(self.folder.plan)), self.folder.log("supervisor")
        self.process = start_python(*words, log=log)

    def until(self, condition: Callable[[StackState], bool], seconds: float = 60) -> StackState:
        def look() -> StackState | None:
            return state if (state := self.folder.read()) and condition(state) else None

        return wait_until(look, "the state", seconds, explain=self.folder.log("supervisor").read_text)

    def until_logged(self, service: str, text: str) -> None:
        log = self.folder.log(service)
        wait_until(lambda: log.exists() and text in log.read_text(), f"{service} says {text!r}")

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=60)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path / "state")
    yield harness
    if harness.process and harness.process.poll() is None:
        kill(harness.process)


def service(state: StackState, name: str) -> ServiceState:
    return next(s for s in state.services if s.name == name)


def all_running(state: StackState) -> bool:
    return bool(state.services) and all(s.phase == "running" for s in state.services)


def gone(pid: int | None) -> bool:
    assert pid is not None
    return wait_until(lambda: not is_alive(pid), f"process {pid} is gone")


def test_a_killed_redis_comes_back_with_its_data(harness: Harness) -> None:
    port = free_port()
    harness.folder.create()
    spec = ServiceSpec(name="redis", role="redis", command=server_command(harness.folder.redis_data, port))
    harness.run(StackPlan(state_folder=harness.folder.path, coordinator="-", redis=url(port), services=[spec], **FAST))
    state = harness.until(all_running)
    wait_until_up(url(port), seconds=60)
    with redis.Redis.from_url(url(port)) as client:
        client.set("kept", "yes")
        await_append_only_file(url(port))
        os.kill(service(state, "redis").pid, signal.SIGKILL)
        harness.until(lambda s: service(s, "redis").restarts == 1 and all_running(s))
        wait_until_up(url(port), seconds=60)
        assert client.get("kept") == b"yes"
    assert harness.stop() == 0


def test_a_redis_is_starting_until_it_has_loaded_its_data(harness: Harness) -> None:
    port, loaded = free_port(), harness.folder.path / "loaded"
    harness.folder.create()
    command = server_command(harness.folder.redis_data, port)
    wait = f"import os, time\nwhile not os.path.exists({str(loaded)!r}): time.sleep(0.05)\n"
    slow = wait + f"os.execv({command[0]!r}, {command!r})"
    specs = [
        ServiceSpec(name="redis", role="redis", command=[sys.executable, "-c", slow]),
        ServiceSpec(name="reward", role="reward", command=[sys.executable, "-c", SLEEP]),
    ]
    harness.run(StackPlan(state_folder=harness.folder.path, coordinator="-", redis=url(port), services=specs, **FAST))
    state = harness.until(lambda s: service(s, "redis").pid is not None)
    assert [s.phase for s in state.services] == ["starting", "starting"]
    loaded.touch()
    harness.until(all_running)
    assert harness.stop() == 0


def test_a_redis_that_cannot_start_ends_the_supervisor(harness: Harness) -> None:
    harness.folder.create()
    spec = ServiceSpec(name="redis", role="redis", command=[sys.executable, "-c", "raise SystemExit('no disk')"])
    port = free_port()
    harness.run(StackPlan(state_folder=harness.folder.path, coordinator="-", redis=url(port), services=[spec], **FAST))
    assert harness.process.wait(timeout=60) == 1
    assert f"Redis at 127.0.0.1:{port} does not answer" in harness.folder.log("supervisor").read_text()
    assert harness.folder.log_tail("redis") == ["no disk"]


def test_replicas_stop_before_the_coordinator(harness: Harness) -> None:
    harness.start({"coordinator": TIDY, "reward": TIDY, "rollout-1": TIDY})
    state = harness.until(all_running)
    for name in ("coordinator", "reward", "rollout-1"):
        harness.until_logged(name, "ready")
    assert harness.stop() == 0
    assert all(gone(s.pid) for s in state.services)
    stopped = {s.name: float(harness.folder.log(s.name).read_text().split()[-1]) for s in state.services}
    assert stopped["coordinator"] > max(stopped["reward"], stopped["rollout-1"])


def test_a_killed_service_is_restarted_with_its_children_gone(harness: Harness) -> None:
    harness.start({"reward": WITH_CHILD, "advantage": SLEEP})
    before = harness.until(all_running)
    old = psutil.Process(service(before, "reward").pid)
    children = wait_until(old.children, "its child")
    os.kill(old.pid, signal.SIGKILL)
    after = harness.until(lambda s: service(s, "reward").restarts == 1 and all_running(s))
    assert service(after, "reward").pid != old.pid
    assert service(after, "advantage").pid == service(before, "advantage").pid
    assert gone(children[0].pid)
    assert "reward was killed by SIGKILL; restarting it" in harness.folder.log("supervisor").read_text()
    assert harness.stop() == 0


def test_a_service_that_keeps_dying_is_given_up(harness: Harness) -> None:
    harness.start({"reward": "raise SystemExit('no such thing')", "advantage": SLEEP}, max_restarts=2)
    state = harness.until(lambda s: bool(s.failed()))
    assert service(state, "reward").restarts == 2
    assert service(state, "reward").exit_code == 1
    assert service(state, "advantage").phase == "running"
    assert harness.folder.log_tail("reward") == ["no such thing"] * 3
    assert "not restarting it" in harness.folder.log("supervisor").read_text()
    assert harness.stop() == 0


def test_what_does_not_stop_is_killed(harness: Harness) -> None:
    harness.start({"reward": STUBBORN}, grace_seconds=0.3)
    state = harness.until(all_running)
    harness.until_logged("reward", "deaf")
    assert harness.stop() == 0
    assert gone(service(state, "reward").pid)
    assert "did not stop within its grace period" in harness.folder.log("supervisor").read_text()


def test_services_do_not_outlive_a_killed_supervisor(harness: Harness) -> None:
    harness.start({"reward": SLEEP})
    state = harness.until(all_running)
    harness.process.kill()
    harness.process.wait()
    assert gone(service(state, "reward").pid)
    assert harness.folder.read() is None


def test_one_supervisor_a_folder(harness: Harness) -> None:
    harness.start({"reward": SLEEP})
    harness.until(all_running)
    second = run_python("-m", "relaxd.local.supervisor", str(harness.folder.plan))
    assert second.returncode == 1
    assert "services are already up" in second.stdout
    assert harness.stop() == 0


def test_stops_when_its_starter_is_gone(harness: Harness) -> None:
    harness.folder.create()
    command = [sys.executable, "-c", SLEEP]
    spec = ServiceSpec(name="reward", role="reward", command=command)
    plan = StackPlan(
        state_folder=harness.folder.path, coordinator="-", redis="-", services=[spec], stop_with_parent=True
    )
    harness.folder.plan.write_text(plan.model_dump_json())
    starter = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-m', 'relaxd.local.supervisor', {str(harness.folder.plan)!r}])\n"
        "time.sleep(600)"
    )
    process = start_python("-c", starter)
    state = harness.until(all_running)
    kill(process)
    assert harness.folder.wait_until_down(60)
    assert gone(state.pid)
    assert gone(service(state, "reward").pid)
