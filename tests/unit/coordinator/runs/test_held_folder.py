"""A run's folder is held by one stack while the run goes on."""

import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from relaxd.run_folder import RECORD, STACK, holder_of, use_of
from services.coordinator.runs.run_files import FolderHeld, held_folder
from tests.kit.waiting import wait_until

WAIT_SECONDS = 20.0


def test_a_folder_names_the_stack_that_works_on_its_run(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    with held_folder(tmp_path, "one-1"):
        assert holder_of(tmp_path) == "one-1"
    assert holder_of(tmp_path) is None
    with held_folder(tmp_path, "two-2"):
        assert holder_of(tmp_path) == "two-2"


def test_a_successor_holds_the_folder_once_its_predecessor_has_ended(tmp_path: Path) -> None:
    with ExitStack() as successor:
        with held_folder(tmp_path, "one-1"):
            successor.enter_context(held_folder(tmp_path, "one-1", beside=("one-1",)))
            with pytest.raises(FolderHeld), held_folder(tmp_path, "two-2", beside=("two-2",)):
                pass
        wait_until(lambda: holder_of(tmp_path) == "one-1", "the successor to lock the folder")
    assert holder_of(tmp_path) is None


@pytest.mark.parametrize("number", range(4))
def test_one_of_two_that_open_a_folder_together_holds_it(tmp_path: Path, number: int) -> None:
    """The other one names it, not the one that held the folder before."""
    with held_folder(tmp_path, "earlier-0"):
        pass
    begin, end = threading.Barrier(2), threading.Barrier(2)

    def open_it(stack: str) -> str:
        begin.wait(WAIT_SECONDS)
        try:
            with held_folder(tmp_path, stack):
                end.wait(WAIT_SECONDS)
                return stack
        except FolderHeld as error:
            end.wait(WAIT_SECONDS)
            return f"refused: {error.holder}"

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(open_it, ("one-1", "two-2")))
    winner = next(one for one in found if not one.startswith("refused"))
    assert sorted(found) == sorted([winner, f"refused: {winner}"])


def test_readers_keep_nobody_out(tmp_path: Path) -> None:
    (tmp_path / STACK).write_text("earlier-0\n")
    with (tmp_path / STACK).open() as file, ThreadPoolExecutor(1) as thread:
        fcntl.flock(file, fcntl.LOCK_SH)  # as `holder_of` does for a moment
        waits = thread.submit(lambda: held_folder(tmp_path, "one-1").__enter__())
        fcntl.flock(file, fcntl.LOCK_UN)
        waits.result(WAIT_SECONDS)


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
