"""Reading a run's folder while its files grow, and after their writer died in the middle of a line."""

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest

from relaxd import run_folder
from relaxd.run_folder import (
    GROUPS,
    SAMPLES,
    append_lines,
    append_whole,
    closed_groups,
    is_run,
    newest_lines,
    newest_samples,
    read_lines,
)
from services.coordinator.runs.run_files import RunFiles
from services.coordinator.state.store import Superseded


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_lines_are_the_same_from_both_ends(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "BLOCK_BYTES", block)
    path = tmp_path / "lines.jsonl"
    assert list(newest_lines(path)) == list(read_lines(path)) == []
    values = [{"step": step, "text": "ü\n" * (step % 5)} for step in range(40)]
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))
    assert list(read_lines(path)) == values
    assert list(newest_lines(path)) == values[::-1]
    with path.open("a") as file:
        file.write('{"step": 40, "te')
    assert list(read_lines(path)) == values
    assert list(newest_lines(path)) == values[::-1]


def test_samples_go_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert files.rewind_samples(0) == 0
    files.append_samples([{"step": 1, "response": "a"}, {"step": 2, "response": "b", "reward": float("nan")}])
    with (tmp_path / SAMPLES).open("a") as file:
        file.write('{"step": 3, "resp')
    assert files.rewind_samples(2) == 2
    files.append_samples([{"step": 3, "response": "c"}])
    assert [line["response"] for line in newest_samples(tmp_path)] == ["c", "b", "a"]
    assert files.rewind_samples(3) == 3


def sample_lines(text: str) -> str:
    """Lines of samples, by their entries, with a letter after each that says who wrote it."""
    return "".join(json.dumps({"entry": one[:-1], "step": int(one[0]), "by": one[-1]}) + "\n" for one in text.split())


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("1-0a 1-1a 2-0a", "2-0a 1-1a 1-0a"),
        ("1-0a 2-0a 2-1a 2-0b 2-1b 3-0b", "3-0b 2-1b 2-0b 1-0a"),  # both wrote step 2
        ("1-0a 2-0a 2-0b 2-1a 2-1b", "2-1b 2-0b 1-0a"),  # at the same time
        ("1-0a 2-0b 3-0b 2-0a", "2-0a 3-0b 1-0a"),  # the old one late
    ],
)
def test_each_sample_is_found_once(tmp_path: Path, written: str, found: str) -> None:
    (tmp_path / SAMPLES).write_text(sample_lines(written))
    assert [line["entry"] + line["by"] for line in newest_samples(tmp_path)] == found.split()


@pytest.mark.parametrize(
    ("last_step", "left", "last"),
    [(3, "1-0a 2-0a 2-1a 3-0a", 3), (2, "1-0a 2-0a 2-1a", 2), (9, "1-0a 2-0a 2-1a 3-0a", 3), (0, "", 0)],
)
def test_samples_of_steps_that_redis_has_lost_are_removed(tmp_path: Path, last_step: int, left: str, last: int) -> None:
    (tmp_path / SAMPLES).write_text(sample_lines("1-0a 2-0a 2-1a 3-0a"))
    assert RunFiles(tmp_path).rewind_samples(last_step) == last
    assert (tmp_path / SAMPLES).read_text() == sample_lines(left)


def test_a_coordinator_that_was_replaced_removes_no_samples(tmp_path: Path) -> None:
    def check() -> None:
        if (tmp_path / SAMPLES).exists():
            raise Superseded("a newer one")

    files = RunFiles(tmp_path)
    files.take_over_steps(lambda after, limit: [], check, ())
    (tmp_path / SAMPLES).write_text(sample_lines("1-0a 2-0b"))
    assert files.rewind_samples(2) == 2
    with pytest.raises(Superseded):
        files.rewind_samples(1)
    assert (tmp_path / SAMPLES).read_text() == sample_lines("1-0a 2-0b")
    files.close()


@pytest.mark.parametrize(
    ("written", "counted"),
    [
        ("5-0 5-1 6-0", "5-0 5-1 6-0"),
        ("5-0 5-1 5-1 6-0", "5-0 5-1 6-0"),  # both wrote the same
        ("5-0 5-1 6-0 5-0 5-1 6-0 7-0", "5-0 5-1 6-0 7-0"),  # the old one late
        ("5-0 5-1 5-0 6-0 5-1 7-0 6-0", "5-0 5-1 6-0 7-0"),  # one between the other's lines
        ("9-9 9-10 10-0 9-10", "9-9 9-10 10-0"),  # entries are numbers
        ("5-0 - 6-0 - 5-0", "5-0 - 6-0 -"),  # lines without an entry
    ],
)
def test_each_fate_counts_once(tmp_path: Path, written: str, counted: str) -> None:
    path = tmp_path / GROUPS
    entries = [{"group": str(n), **({"entry": one} if one != "-" else {})} for n, one in enumerate(written.split())]
    path.write_text("".join(json.dumps(one) + "\n" for one in entries))
    assert [line.get("entry", "-") for line in closed_groups(tmp_path)] == counted.split()
    # From the middle, it is the same if one knows the highest entry so far.
    for number in range(1, len(entries)):
        before = [one["entry"] for one in entries[:number] if "entry" in one]
        highest = max(before, key=lambda entry: tuple(map(int, entry.split("-"))))
        start = sum(len(line) for line in path.read_text().splitlines(keepends=True)[:number])
        (tmp_path / "first").mkdir(exist_ok=True)
        (tmp_path / "first" / GROUPS).write_bytes(path.read_bytes()[:start])
        both = [*closed_groups(tmp_path / "first"), *closed_groups(tmp_path, start, highest)]
        assert [line.get("entry", "-") for line in both] == counted.split()


def test_a_failed_append_leaves_what_others_have_appended(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"

    class Full(io.FileIO):
        """A disk that is full after a few bytes, while another process appends."""

        def write(self, data: Any) -> int:
            if len(data) < 20:
                append_lines(path, '{"by": "another"}\n')
                raise OSError(errno.ENOSPC, "full")
            return super().write(data[:10])

    with Full(path, "ab") as file, pytest.raises(OSError, match="full"):
        append_whole(file, b'{"by": "this one", "n": 1}\n')
    append_lines(path, '{"by": "the next"}\n')
    assert b'{"by": "another"}\n' in path.read_bytes()
    assert [line["by"] for line in read_lines(path)][-1] == "the next"


def test_a_name_that_no_file_can_have_is_no_run(tmp_path: Path) -> None:
    assert not is_run(tmp_path / ("x" * 5000))
    assert not is_run(tmp_path)
