"""ledger.jsonl and metrics.jsonl: one line per committed step, whoever commits again, dies or was replaced."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relaxd.board import LedgerEntry, LedgerTrimmed
from relaxd.board.types import GroupOutcome
from relaxd.run_folder import read_lines
from services.coordinator.runs.line_files import LEFTOVER_SECONDS, PAGE
from services.coordinator.runs.run_files import RunFiles
from services.coordinator.state.records import Evaluation
from services.coordinator.state.store import StoreUnavailable, Superseded
from tests.kit.disks import full_disk


class Ledger:
    """The board's ledger, and how much of it was read."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        self.read_entries = 0
        self.away = False
        self.first = 1
        """The step with which the board's ledger begins; those before were trimmed."""

    def commit(self, *steps: int, term: int = 1) -> None:
        """Commit steps; one that is there, and all after it, were lost."""
        for step in steps:
            del self.entries[step - 1 :]
            plan = {"groups": [f"{term}-{step}"]}
            self.entries.append(LedgerEntry(step, 100.0 * term + step, term, plan, {"loss": step / term}))

    def read(self, after: int, limit: int) -> list[LedgerEntry]:
        if self.away:
            raise ConnectionError("away")
        if after + 1 < self.first:
            raise LedgerTrimmed(self.first, f"begins at step {self.first}")
        found = self.entries[after : after + limit]
        self.read_entries += len(found)
        return found


def nothing() -> None:
    """This coordinator was not replaced."""


def open_files(folder: Path, ledger: Ledger, *evaluations: Evaluation) -> RunFiles:
    files = RunFiles(folder)
    files.take_over_steps(ledger.read, nothing, evaluations)
    return files


def follow(files: RunFiles, ledger: Ledger, **measured: float) -> None:
    """What the run does at each new step."""
    while entries := files.next_steps(ledger.read):
        files.metrics.append((entry.step, {**entry.metrics, **measured}) for entry in entries)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def check(folder: Path, ledger: Ledger) -> None:
    assert [(line["step"], line["plan"]["groups"]) for line in lines(folder, "ledger.jsonl")] == [
        (entry.step, entry.plan["groups"]) for entry in ledger.entries
    ]
    steps = [line for line in lines(folder, "metrics.jsonl") if line["step"]]
    assert [(line["step"], line["loss"]) for line in steps] == [
        (entry.step, entry.metrics["loss"]) for entry in ledger.entries
    ]


def test_a_step_that_is_committed_again_replaces_its_line(tmp_path: Path) -> None:
    ledger = Ledger()
    files = open_files(tmp_path, ledger)
    ledger.commit(1, 2, 3, 4)
    follow(files, ledger, measured=1.0)
    ledger.commit(3, 4, 5, term=2)  # Redis failed over, and had lost steps 3 and 4
    follow(files, ledger, measured=2.0)
    check(tmp_path, ledger)
    assert [line["measured"] for line in lines(tmp_path, "metrics.jsonl")] == [1.0, 1.0, 2.0, 2.0, 2.0]
    ledger.commit(2, term=3)  # fewer steps than before: as soon as the run looks
    follow(files, ledger)
    check(tmp_path, ledger)
    ledger.commit(1, term=4)
    del ledger.entries[:]
    follow(files, ledger)
    check(tmp_path, ledger)


def test_what_dead_coordinators_left_is_removed(tmp_path: Path) -> None:
    old, young = tmp_path / "ledger.jsonl.1-ab.tmp", tmp_path / "ledger.jsonl.1-cd.tmp"
    for path, age in ((old, 2 * LEFTOVER_SECONDS), (young, 0.0)):
        path.touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    open_files(tmp_path, Ledger())
    assert (old.exists(), young.exists()) == (False, True)


def test_two_coordinators_of_one_process_id_write_files_of_their_own(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.commit(1, 2)
    follow(open_files(tmp_path, ledger), ledger)

    def replaced() -> None:
        raise Superseded("a newer one")

    def old_one_writes() -> None:
        with pytest.raises(Superseded):
            RunFiles(tmp_path).take_over_steps(ledger.read, replaced, ())

    new = RunFiles(tmp_path)
    new.take_over_steps(ledger.read, old_one_writes, ())
    ledger.commit(3)
    follow(new, ledger)
    check(tmp_path, ledger)
    assert not list(tmp_path.glob("*.tmp"))


def test_steps_are_appended_after_an_evaluation_that_could_not_be_added(tmp_path: Path) -> None:
    ledger, away = Ledger(), [False]

    def check_term() -> None:
        if away[0]:
            raise StoreUnavailable("no answer")

    files = RunFiles(tmp_path)
    files.take_over_steps(ledger.read, check_term, ())
    ledger.commit(1, 2)
    follow(files, ledger)
    away[0], evaluation = True, Evaluation(step=1, metrics={"eval_reward": 0.5})
    with pytest.raises(StoreUnavailable):
        files.metrics.add(evaluation)
    ledger.commit(3)
    follow(files, ledger)
    check(tmp_path, ledger)
    away[0] = False
    files.metrics.add(evaluation)
    check(tmp_path, ledger)
    assert [line.get("eval_reward") for line in lines(tmp_path, "metrics.jsonl")] == [0.5, None, None]


def test_a_coordinator_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    old = open_files(tmp_path, ledger)
    ledger.commit(1, 2)
    follow(old, ledger, measured=1.0)
    new = open_files(tmp_path, ledger)
    ledger.commit(3)
    follow(old, ledger, measured=1.0)
    follow(new, ledger, measured=2.0)
    check(tmp_path, ledger)
    assert [line["measured"] for line in lines(tmp_path, "metrics.jsonl")] == [1.0, 1.0, 2.0]

    def replaced() -> None:
        raise Superseded("by another")

    with pytest.raises(Superseded):
        RunFiles(tmp_path).take_over_steps(ledger.read, replaced, ())
    check(tmp_path, ledger)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_what_a_dead_coordinator_left_is_completed(tmp_path: Path, cut: int) -> None:
    ledger = Ledger()
    ledger.commit(1, 2)
    evaluations = [Evaluation(step=0, metrics={"eval_reward": 0.1}), Evaluation(step=2, metrics={"eval_reward": 0.2})]
    follow(open_files(tmp_path, ledger), ledger)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-cut])  # it died while it wrote, and before it added the evaluations
    ledger.commit(3)
    files = open_files(tmp_path, ledger, *evaluations)
    check(tmp_path, ledger)
    assert [line.get("eval_reward") for line in lines(tmp_path, "metrics.jsonl")] == [0.1, None, 0.2, None]
    ledger.commit(4)
    follow(files, ledger)
    check(tmp_path, ledger)


def test_a_line_that_somebody_removed_is_written_again(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.commit(*range(1, 6))
    open_files(tmp_path, ledger)
    path = tmp_path / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join([kept[0], "damaged\n", *kept[3:]]))
    open_files(tmp_path, ledger)
    check(tmp_path, ledger)


def test_an_evaluation_is_in_its_steps_line_whichever_comes_first(tmp_path: Path) -> None:
    ledger = Ledger()
    files = open_files(tmp_path, ledger)
    files.metrics.add(Evaluation(step=0, metrics={"eval_reward": 0.0}))
    ledger.commit(1, 2)
    follow(files, ledger, measured=1.0)
    files.metrics.add(Evaluation(step=1, metrics={"eval_reward": 0.1}))
    files.metrics.add(Evaluation(step=3, metrics={"eval_reward": float("nan")}))
    ledger.commit(3)
    follow(files, ledger, measured=1.0)
    check(tmp_path, ledger)
    found = [
        (line["step"], line.get("measured"), line.get("eval_reward")) for line in read_lines(tmp_path / "metrics.jsonl")
    ]
    assert found == [(0, None, 0.0), (1, 1.0, 0.1), (2, 1.0, None), (3, 1.0, None)]


def test_an_outage_of_redis_in_the_middle_loses_no_line(tmp_path: Path) -> None:
    ledger = Ledger()
    files = open_files(tmp_path, ledger)
    ledger.commit(1, 2)
    entries = files.next_steps(ledger.read)  # whose metrics are not appended: the coordinator was interrupted
    assert [entry.step for entry in entries] == [1, 2]
    ledger.away = True
    with pytest.raises(ConnectionError):
        files.next_steps(ledger.read)
    ledger.away = False
    follow(files, ledger)
    check(tmp_path, ledger)


def test_a_long_run_is_read_from_where_its_files_end(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.commit(*range(1, 2 * PAGE + 10))
    files = open_files(tmp_path, ledger)
    check(tmp_path, ledger)
    ledger.read_entries = 0
    ledger.commit(2 * PAGE + 10)
    follow(files, ledger)
    files.metrics.add(Evaluation(step=2 * PAGE, metrics={"eval_reward": 1.0}))
    follow(open_files(tmp_path, ledger), ledger)
    check(tmp_path, ledger)
    assert ledger.read_entries < 10


def test_steps_that_the_board_has_trimmed_stay_in_the_files(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.commit(*range(1, 31))
    follow(open_files(tmp_path, ledger), ledger)
    ledger.first = 21
    follow(open_files(tmp_path, ledger), ledger)  # the next coordinator
    check(tmp_path, ledger)
    (tmp_path / "metrics.jsonl").unlink()  # the ledger's file has what the board has not
    files = open_files(tmp_path, ledger)
    check(tmp_path, ledger)
    ledger.commit(28, 29, 30, 31, term=2)
    follow(files, ledger)
    check(tmp_path, ledger)
    ledger.commit(*range(21, 40), term=3)  # all that the board has is new
    follow(open_files(tmp_path, ledger), ledger)
    check(tmp_path, ledger)


def test_a_file_that_lacks_trimmed_steps_loses_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    ledger.commit(*range(1, 31))
    follow(open_files(tmp_path, ledger), ledger)
    ledger.first = 21
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:9]))
    ledger.commit(31)
    follow(open_files(tmp_path, ledger), ledger)
    assert [line["step"] for line in lines(tmp_path, "ledger.jsonl")] == [*range(1, 10), *range(21, 32)]
    assert f"{path} ends at step 9, but the board's ledger begins at step 21: the steps between are lost" in caplog.text


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    ledger = Ledger()
    files = open_files(tmp_path, ledger)
    ledger.commit(*range(1, 21))
    follow(files, ledger)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ledger.commit(*range(21, 41))
    evaluation = Evaluation(step=20, metrics={"eval_reward": 0.5})
    samples = [{"step": step, "response": "x" * 100} for step in range(1, 21)]
    fates = [GroupOutcome(f"{number}-0", {"group": f"0-{number}"}) for number in range(100)]
    writes: dict[str, Callable[[], object]] = {
        "ledger.jsonl": lambda: files.next_steps(ledger.read),
        "metrics.jsonl": lambda: files.metrics.append((entry.step, entry.metrics) for entry in ledger.entries[20:]),
        "metrics.jsonl.tmp": lambda: files.metrics.add(evaluation),
        "samples.jsonl": lambda: files.append_samples(samples),
        "groups.jsonl": lambda: files.append_groups(fates),
    }
    for name, write in writes.items():
        with full_disk(len(before.get(name, b"")) + 20), pytest.raises(OSError, match="too large"):
            write()
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.stat().st_size} == before
    entries = files.next_steps(ledger.read)
    files.metrics.append((entry.step, entry.metrics) for entry in entries)
    files.metrics.add(evaluation)
    files.append_samples(samples)
    assert files.append_groups(fates) == (tmp_path / "groups.jsonl").stat().st_size
    check(tmp_path, ledger)
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl") if "eval_reward" in line] == [20]
    assert lines(tmp_path, "samples.jsonl") == samples
    assert len(lines(tmp_path, "groups.jsonl")) == 100
    assert not list(tmp_path.glob("*.tmp"))


def test_an_evaluation_changes_its_steps_line_only(tmp_path: Path) -> None:
    ledger = Ledger()
    files = open_files(tmp_path, ledger)
    ledger.commit(*range(1, 122))
    follow(files, ledger)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for number, step in enumerate((12, 121, 0, 0)):
        files.metrics.add(Evaluation(step=step, metrics={"eval_reward": float(number)}))
    after = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    check(tmp_path, ledger)
    assert [(json.loads(line)["step"], json.loads(line)["eval_reward"]) for line in after if line not in before] == [
        (0, 3.0),
        (12, 0.0),
        (121, 1.0),
    ]
    assert len(after) == len(before) + 1


def test_an_evaluation_of_a_long_run_is_added_without_encoding_all_steps(tmp_path: Path) -> None:
    metrics = {f"metric_{number}": number / 7 for number in range(80)}
    files = open_files(tmp_path, Ledger())
    began = time.process_time()
    files.metrics.append((step, metrics) for step in range(1, 5001))
    written = time.process_time()
    files.metrics.add(Evaluation(step=5000, metrics={"eval_reward": 0.5}))
    seconds, encoding = time.process_time() - written, written - began
    assert json.loads((tmp_path / "metrics.jsonl").read_bytes().splitlines()[-1])["eval_reward"] == 0.5
    assert seconds < encoding / 3, "it encodes all lines again"
