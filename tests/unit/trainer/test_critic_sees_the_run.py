"""A critic service that doesn't see the run's folder says so by name."""

from pathlib import Path
from typing import Any

import pytest

from relaxd.rpc.errors import FailedPrecondition
from relaxd.v1.coordinator_pb2 import Assignment
from services.trainer.critic import follower, service
from services.trainer.critic.service import CriticService


def check(folder: Path) -> None:
    nothing: Any = None
    CriticService._check(nothing, nothing, Assignment(folder=str(folder)))


def test_a_folder_that_is_not_there_or_not_the_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FOLDER_SECONDS", 0.0)
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FailedPrecondition, match=f"doesn't see the run's folder: {folder} has no run.json"):
            check(folder)
    for name in ("run.json", "config.json"):
        (tmp_path / name).write_text("{}")
    check(tmp_path)


def test_a_step_file_that_does_not_appear_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "FILE_SECONDS", 0.0)

    with pytest.raises(follower.StepFileError, match=r"step-000003.safetensors isn't there, 0 s after its step"):
        follower.await_step_file(tmp_path, 3, lambda path: None)
