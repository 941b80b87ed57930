"""The trackers' process on a run's folder, and readers of what it writes."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RunConfig, TrackingConfig
from relaxd.config.load_toml import load
from services.coordinator.runs.run_files import RunFiles
from tests.kit.processes import kill, start_python
from tests.kit.run_folders import CONFIG
from tests.kit.waiting import wait_until


class TrackersProcess:
    """The process, its input and its reports."""

    def __init__(self, folder: Path, log: Path, **tracking: Any) -> None:
        config = with_trackers(**tracking)
        given = {"run_id": "r", "folder": str(folder), "tracking": config.tracking.model_dump(mode="json")}
        self._reports = (folder / "reports").open("ab+")
        self.log = log
        self.process = start_python(
            *("-m", "relaxd.trackers"),
            stdin=subprocess.PIPE,
            stdout=self._reports,
            stderr=log.open("ab"),
            environment={"WANDB_SILENT": "true", "TRACKIO_DIR": str(folder / "trackio")},
            python=config.tracking.python or sys.executable,
        )
        self.tell(json.dumps(given))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Tell it that the run has ended, and wait until it has."""
        self.tell("end")
        assert self.process.wait(60) == 0, self.log.read_text()

    def reports(self) -> list[dict[str, str]]:
        self._reports.seek(0)
        return [json.loads(line) for line in self._reports.read().decode().splitlines()]

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        return wait_until(look, what, 60, explain=lambda: f"{self.reports()}\n{self.log.read_text()}")

    def close(self) -> None:
        kill(self.process)
        self._reports.close()


def with_trackers(**tracking: Any) -> RunConfig:
    return load(CONFIG.format(steps=9)).model_copy(update={"tracking": TrackingConfig(**tracking)})


class Tracked:
    """A run's folder, and processes that follow it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs" / "r"
        self._log = folder / "trackers.log"
        self.files = RunFiles(self.folder)
        self.files.create(CONFIG.format(steps=9), with_trackers())
        self.files.take_over_steps(lambda after, limit: [], lambda: None, ())
        self._processes: list[TrackersProcess] = []

    def start(self, *trackers: str, **tracking: Any) -> TrackersProcess:
        process = TrackersProcess(self.folder, self._log, trackers=trackers, **tracking)
        self._processes.append(process)
        return process

    def write(self, first: int, last: int, reward: float = 0.0) -> None:
        """Write steps as the coordinator does, each with two samples."""
        self.files.metrics.append((step, {"reward": reward + step, "loss": 0.5}) for step in range(first, last + 1))
        for step in range(first, last + 1):
            rows = [
                {"step": step, "prompt": f"p{step}", "response": f"<a|{step}>", "reward": 0.5, "entry": f"{step}-0"}
            ]
            self.files.append_samples(rows)

    def close(self) -> None:
        for process in self._processes:
            process.close()


@pytest.fixture
def tracked(tmp_path: Path) -> Iterator[Tracked]:
    tracked = Tracked(tmp_path)
    yield tracked
    tracked.close()


def read_wandb(path: Path) -> list[Any]:
    """Return the records of an offline file of W&B: records in pieces, as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, piece, records = 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block that has no room for a header
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            break
        piece += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            records.append(Record.FromString(piece))
            piece = b""
    return records
