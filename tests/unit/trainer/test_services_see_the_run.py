"""A service that follows the ledger but doesn't see the run's folder says so by name."""

from pathlib import Path

import pytest

from relaxd.roles import CRITIC, REFERENCE
from relaxd.rpc.errors import FailedPrecondition
from services.trainer.batch.step_file import StepFileError, step_file_path
from services.trainer.frozen import run_folder


@pytest.mark.parametrize("role", [CRITIC, REFERENCE])
def test_a_folder_that_is_not_there_or_not_the_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(run_folder, "FOLDER_SECONDS", 0.0)
    for folder in (tmp_path / "nowhere", tmp_path):
        said = f"the {role} doesn't see the run's folder: {folder} has no run.json"
        with pytest.raises(FailedPrecondition, match=said):
            run_folder.await_run_folder(folder, role)
    for name in ("run.json", "config.json"):
        (tmp_path / name).write_text("{}")
    run_folder.await_run_folder(tmp_path, role)


def test_a_step_file_that_does_not_appear_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "FILE_SECONDS", 0.0)
    said = r"step-000003.safetensors isn't there, 0 s after its step .* this critic"
    with pytest.raises(StepFileError, match=said):
        run_folder.await_file(step_file_path(tmp_path, 3), CRITIC, lambda path: None)
