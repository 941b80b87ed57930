"""A service that follows the ledger but doesn't see the run's folder says so by name."""

from datetime import UTC, timedelta
from pathlib import Path

import pytest

from relaxd.roles import CRITIC, REFERENCE
from relaxd.rpc.errors import FailedPrecondition
from relaxd.v1.coordinator_pb2 import Assignment
from services.coordinator.state.records import RunRecord
from services.trainer.batch.step_plan import StepFileError, step_file_path
from services.trainer.reference_models import followed_folder
from tests.integration.trainer.service_kit import BEGUN, mark_folder


@pytest.mark.parametrize("role", [CRITIC, REFERENCE])
def test_a_folder_that_is_not_there_or_not_the_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(followed_folder, "FOLDER_SECONDS", 0.0)
    for folder in (tmp_path / "nowhere", tmp_path):
        said = f"the {role} doesn't see the run's folder: {folder} has no run.json"
        with pytest.raises(FailedPrecondition, match=said):
            followed_folder.await_run_folder(folder, role, BEGUN)
    mark_folder(tmp_path)
    followed_folder.await_run_folder(tmp_path, role, BEGUN)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"begin_time": 7}', '{"begin_time": "soon"}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(followed_folder, "FOLDER_SECONDS", 0.0)
    mark_folder(tmp_path)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(FailedPrecondition, match=r"has no run\.json"):
        followed_folder.await_run_folder(tmp_path, CRITIC, BEGUN)


def test_a_copy_from_before_the_run_was_restored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_folder, "FOLDER_SECONDS", 0.0)
    mark_folder(tmp_path, BEGUN - timedelta(microseconds=1))
    with pytest.raises(FailedPrecondition, match=r"here began at .*678900\+00:00, this one at .*678901\+00:00"):
        followed_folder.await_run_folder(tmp_path, CRITIC, BEGUN)


def test_the_coordinators_record_is_the_mark(tmp_path: Path) -> None:
    record = RunRecord(run_id="run", config_json="{}", folder=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run.json").write_text(record.model_dump_json())
    sent = Assignment()
    sent.begin_time.FromDatetime(record.begin_time)
    followed_folder.await_run_folder(tmp_path, CRITIC, sent.begin_time.ToDatetime(UTC))


def test_a_step_file_that_does_not_appear_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_folder, "FILE_SECONDS", 0.0)
    said = r"step-000003.safetensors isn't there, 0 s after its step .* this critic"
    with pytest.raises(StepFileError, match=said):
        followed_folder.await_file(step_file_path(tmp_path, 3), CRITIC, lambda path: None)
