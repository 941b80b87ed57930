"""Notifications with the real Apprise and a real HTTP server: of the process, the coordinator and the command."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RunConfig
from relaxd.config.load_toml import load
from relaxd.config.operation import AlertsConfig
from services.coordinator.runs.run_files import RunFiles
from tests.kit.ports import free_port
from tests.kit.processes import kill, run_python, start_python
from tests.kit.run_folders import CONFIG
from tests.kit.waiting import wait_until
from tests.kit.webhook import Webhook, webhook

pytest.importorskip("apprise", reason="pip install relaxd[alerts]")


@pytest.fixture
def server() -> Iterator[Webhook]:
    with webhook() as server:
        yield server


def status(state: str = "running", step: int = 0, *alarms: str) -> dict[str, Any]:
    found = [{"name": name, "first_step": 1, "text": f"{name} is wrong"} for name in alarms]
    times = {"begin_time": "b", "pause_time": "", "end_time": "e" if state == "stopped" else ""}
    return {"state": state, "reason": "", "step": step, "steps": 9, "alarms": found, **times}


class Process:
    """The trackers' process on a run's folder, with addresses and no tracker."""

    def __init__(self, folder: Path, *urls: str, **alerts: Any) -> None:
        self.folder = folder / "runs" / "r"
        config = load(CONFIG.format(steps=9)).model_copy(update={"alerts": AlertsConfig(**alerts)})
        self.files = RunFiles(self.folder)
        if not self.folder.exists():
            self.files.create(CONFIG.format(steps=9), config)
        self.files.take_over_steps(lambda after, limit: [], lambda: None, ())
        self.log = folder / "log"
        self._reports = (folder / "reports").open("ab+")
        self.process = start_python(
            *("-m", "relaxd.trackers"),
            stdin=subprocess.PIPE,
            stdout=self._reports,
            stderr=self.log.open("ab"),
            environment={"RELAXD_ALERT_URLS": " ".join(urls)},
        )
        self.tell(given(config, self.folder))

    def tell(self, value: dict[str, Any]) -> None:
        self.write(json.dumps(value))

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.write("end")
        assert self.process.wait(60) == 0, self.log.read_text()

    def reports(self) -> list[dict[str, str]]:
        self._reports.seek(0)
        return [json.loads(line) for line in self._reports.read().decode().splitlines()]

    def until(self, what: str, look: Any) -> Any:
        return wait_until(look, what, 60, explain=lambda: f"{self.reports()}\n{self.log.read_text()}")

    def close(self) -> None:
        kill(self.process)
        self._reports.close()


def given(config: RunConfig, folder: Path) -> dict[str, Any]:
    sections = {name: getattr(config, name).model_dump(mode="json") for name in ("tracking", "alerts")}
    return {"run_id": "r", "folder": str(folder), **sections}


def test_one_address_that_is_down_holds_no_other_up_and_nothing_shows_a_secret(server: Webhook, tmp_path: Path) -> None:
    away = f"json://127.0.0.1:{free_port()}/hunter2"
    process = Process(tmp_path, f"{server.url}?freq=2", away, "slack://hunter2")
    try:
        process.tell(status())
        process.until("the beginning", lambda: server.titles == ["run r begins"])
        process.files.metrics.append((step, {"reward_mean": step / 4}) for step in range(1, 4))
        process.until("a report", lambda: server.titles[1:] == ["run r: step 2"])
        process.tell(status("running", 3, "kl"))
        process.until("the alarm", lambda: server.titles[2:] == ["run r: alarm"])
        process.tell(status("stopped", 9, "kl"))
        process.end()
        assert server.titles[3:] == ["run r has ended"]
        assert server.posted[2]["message"] == "since step 1: kl is wrong"
        reports = process.reports()
        problems = {one["notifier"]: one["problem"] for one in reports}
        assert problems == {
            "URL 1 (json)": "",
            "URL 2 (json)": "can't be reached; it is tried again every 60 s",
            "URL 3 (slack)": "Apprise can't read this address: compare it with the list on https://appriseit.com",
        }
    finally:
        process.close()
    written = [path.read_text() for path in (*process.folder.rglob("*.*"), process.log) if path.is_file()]
    assert not any("hunter2" in text for text in [*written, json.dumps(reports)])


def test_a_process_that_is_started_again_tells_nothing_twice(server: Webhook, tmp_path: Path) -> None:
    process = Process(tmp_path, server.url)
    try:
        process.tell(status("running", 1, "kl"))
        process.until("the alarm", lambda: server.titles == ["run r: alarm"])
        state = process.folder / "alerts" / "url-1.json"
        process.until("its note", state.is_file)
    finally:
        process.close()
    again = Process(tmp_path, server.url)
    try:
        again.tell(status("running", 2, "kl"))
        again.tell(status("running", 2, "kl", "disk"))
        again.until("the new alarm", lambda: len(server.posted) == 2)
        again.end()
        assert server.posted[1]["message"] == "since step 1: disk is wrong"
    finally:
        again.close()


def test_the_command_says_which_addresses_work(server: Webhook, tmp_path: Path) -> None:
    refusing, file = free_port(), tmp_path / "urls"
    file.write_text(f"{server.url}?freq=5\njson://127.0.0.1:{refusing}/hunter2\nfoo://hunter2\n")
    (tmp_path / "run.toml").write_text(CONFIG.format(steps=9) + f"\n[alerts]\nurls_file = {json.dumps(str(file))}\n")
    done = run_python("-m", "relaxd.cli", "alerts", "test", "run.toml", cwd=tmp_path)
    assert (done.returncode, server.titles) == (1, ["relaxd: test"])
    assert done.stdout.splitlines() == [
        "URL 1 (json): took the test message, with a report every 5 steps",
        "URL 2 (json): can't be reached",
        "URL 3 (foo): Apprise can't read this address: compare it with the list on https://appriseit.com",
    ]
    server.status = 401
    environment = {"RELAXD_ALERT_URLS": server.url}
    done = run_python("-m", "relaxd.cli", "alerts", "test", cwd=tmp_path, environment=environment)
    assert (done.returncode, done.stdout) == (1, "URL 1 (json): answered with HTTP status 401\n")
    assert "hunter2" not in done.stdout + done.stderr


def test_the_command_without_addresses_says_where_they_come_from(tmp_path: Path) -> None:
    environment = {"RELAXD_ALERT_URLS": ""}
    done = run_python("-m", "relaxd.cli", "alerts", "test", cwd=tmp_path, environment=environment)
    assert done.returncode == 1
    assert "neither RELAXD_ALERT_URLS nor alerts.urls_file has one" in done.stderr
