"""Lines of services' logs: their times, which of them are problems, and those of several logs together."""

from pathlib import Path

import pytest

from relaxd.client.service_logs import LogTail, by_time, log_paths

TRAINER = """2026-01-01T12:00:00.000Z INFO trainer step 1
2026-01-01T12:00:03.000Z ERROR trainer it failed
    Traceback (most recent call last):
2026-01-01T12:00:04.000Z INFO trainer step 2
    with a second line
Segmentation fault
"""
ROLLOUT = """before any record
{"time": "2026-01-01T12:00:02.500Z", "level": "WARNING", "service": "rollout-1", "message": "slow"}
{"time": "2026-01-01T12:00:03.500Z", "level": "INFO", "service": "rollout-1", "message": "again"}
"""
REDIS = """12:M 01 Jan 2026 12:00:00.000 * Ready to accept connections
12:M 01 Jan 2026 12:00:01.000 # WARNING overcommit_memory is 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("trainer", TRAINER), ("rollout-1", ROLLOUT), ("redis", REDIS)):
        (tmp_path / f"{name}.log").write_text(text)
    (tmp_path / "rollout-2.log").touch()
    return tmp_path


def test_lines_of_several_services_are_in_the_order_of_their_times(folder: Path) -> None:
    tails = [LogTail(path) for path in log_paths(folder)]
    lines = by_time(tails, [tail.read() for tail in tails])
    assert [(line.service, line.time[14:19], line.is_problem) for line in lines] == [
        ("redis", "", False),
        ("redis", "", True),
        ("rollout-1", "", True),
        ("trainer", "00:00", False),
        ("rollout-1", "00:02", True),
        ("trainer", "00:03", True),
        ("trainer", "00:03", True),
        ("rollout-1", "00:03", False),
        ("trainer", "00:04", False),
        ("trainer", "00:04", False),
        ("trainer", "00:04", True),
    ]
    assert [tail.read() for tail in tails] == [[], [], [], []]


def test_a_service_is_named_by_itself_or_by_its_role(folder: Path) -> None:
    assert [path.stem for path in log_paths(folder, "rollout")] == ["rollout-1", "rollout-2"]
    assert [path.stem for path in log_paths(folder, "rollout-2")] == ["rollout-2"]
    assert log_paths(folder, "nobody") == []


def test_only_the_end_of_a_long_log_is_read(folder: Path) -> None:
    tail = LogTail(folder / "trainer.log", max_bytes=80)
    assert tail.read(100)[-1] == "Segmentation fault"
    assert len(LogTail(folder / "trainer.log", max_bytes=80).read(100)) < 5
