"""Reading a run's folder while its files grow, and after their writer died in the middle of a line."""

import json
from pathlib import Path

import pytest

from relaxd import run_folder
from relaxd.run_folder import newest_lines, read_lines
from services.coordinator.runs.run_files import RunFiles


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
    assert files.end_samples() == 0
    files.append_samples([{"step": 1, "response": "a"}, {"step": 2, "response": "b", "reward": float("nan")}])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "resp')
    assert files.end_samples() == 2
    files.append_samples([{"step": 3, "response": "c"}])
    assert [line["response"] for line in newest_lines(tmp_path / "samples.jsonl")] == ["c", "b", "a"]
    assert files.end_samples() == 3
