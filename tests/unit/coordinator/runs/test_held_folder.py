"""A run's folder is held by one stack while the run goes on."""

from pathlib import Path

from relaxd.run_folder import RECORD, holder_of, use_of
from services.coordinator.runs.run_files import held_folder


def test_a_folder_names_the_stack_that_works_on_its_run(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    with held_folder(tmp_path, "one-1"):
        assert holder_of(tmp_path) == "one-1"
        with held_folder(tmp_path, "one-1"):  # a successor, while its predecessor still lives
            assert holder_of(tmp_path) == "one-1"
    assert holder_of(tmp_path) is None
    with held_folder(tmp_path, "two-2"):
        assert holder_of(tmp_path) == "two-2"


def test_a_folder_that_can_not_be_written_is_not_locked(tmp_path: Path) -> None:
    with held_folder(tmp_path / "missing", "one-1"):
        assert holder_of(tmp_path / "missing") is None


def test_what_keeps_a_new_run_out_of_a_folder_is_named(tmp_path: Path) -> None:
    assert use_of(tmp_path) == ""
    with held_folder(tmp_path, "one-1"):
        assert use_of(tmp_path).startswith(f"{tmp_path} is in use: stack one-1 works on its run")
    assert use_of(tmp_path) == "", "nothing was left there"
    (tmp_path / RECORD).write_text("{}")
    assert use_of(tmp_path).startswith(f"{tmp_path} contains an earlier run")
    with held_folder(tmp_path, "two-2"):
        assert "stack two-2" in use_of(tmp_path)
