"""The board keeps a run's newest steps; all of them are read from the board and the run's folder together."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from relaxd.board import Board, Fenced, LedgerEntry, LedgerTrimmed
from relaxd.board.committed_steps import CommittedSteps
from relaxd.board.sides.coordinator_side import LEDGER_STEPS
from relaxd.run_folder import LEDGER
from tests.kit.boards import advance, audit, group, make_board, take

STEPS = LEDGER_STEPS + 44
FIRST = STEPS - LEDGER_STEPS + 1


def entries(count: int) -> list[LedgerEntry]:
    plans = ({"groups": [f"g{step}"]} for step in range(1, count + 1))
    return [LedgerEntry(step, 100.5 + step, 1, plan, {"loss": step / 4}) for step, plan in enumerate(plans, 1)]


def restored(url: str, count: int = STEPS) -> Board:
    """Return the board of a run of so many steps."""
    board = make_board(url, steps=2 * STEPS)
    board.restore(ledger=entries(count), cursor=None, dropped={}, trainer_term=1)
    return board


def write(folder: Path, steps: list[LedgerEntry]) -> None:
    lines = [json.dumps(asdict(entry)).encode() + b"\n" for entry in steps]
    (folder / LEDGER).write_bytes(b"".join(lines))


def test_only_the_newest_steps_stay_and_the_next_step_follows_them(redis_url: str) -> None:
    board = restored(redis_url)
    stream = f"{board.prefix}ledger"
    assert board._connection.client.xlen(stream) == LEDGER_STEPS
    term = board.new_trainer_term()
    board.set_gate(term=1, oldest_version=STEPS, open=True)
    board.publish(term=1, groups=[group("next")])
    advance(board, ("rollout", "reward", "critic", "advantage"))
    (held,) = take(board, "train")
    board.commit_step(term=term, step=STEPS + 1, plan={"groups": [held.group_id]}, metrics={})
    assert board.trim_ledger(term=1, written=STEPS) == 0  # the last step isn't in the folder yet
    assert board.trim_ledger(term=1, written=STEPS + 1) == 1
    assert board._connection.client.xlen(stream) == LEDGER_STEPS
    assert [entry.step for entry in board.ledger(STEPS)] == [STEPS + 1]
    board.commit_step(term=term, step=STEPS + 1, plan={"groups": [held.group_id]}, metrics={})  # repeated
    counts = board.counts()
    assert (counts.trained, counts.last_step) == (STEPS + 1, STEPS + 1)
    with pytest.raises(Fenced):
        board.trim_ledger(term=0, written=STEPS + 1)


def test_a_step_that_was_trimmed_is_never_passed_over(redis_url: str) -> None:
    board = restored(redis_url)
    for after in (0, 1, FIRST - 2):
        with pytest.raises(LedgerTrimmed, match=f"begins at step {FIRST} in Redis") as error:
            board.ledger(after, 1)
        assert error.value.first == FIRST
    assert [entry.step for entry in board.ledger(FIRST - 1, 2)] == [FIRST, FIRST + 1]
    assert board.ledger(STEPS) == []


def test_all_steps_are_read_in_order(redis_url: str, tmp_path: Path) -> None:
    board, steps = restored(redis_url), entries(STEPS)
    write(tmp_path, steps)
    committed = CommittedSteps(board.ledger, tmp_path)
    assert [entry for page in committed.pages(0) for entry in page] == steps
    assert [entry for page in committed.pages(FIRST - 3) for entry in page] == steps[FIRST - 3 :]
    assert committed(5, 1) == steps[5:6]  # back again
    assert committed(FIRST - 2, 10) == steps[FIRST - 2 : FIRST - 1]  # as far as the file is needed
    assert committed(STEPS, 10) == []


@pytest.mark.parametrize("there", [[], entries(9), entries(9)[:4] + entries(9)[5:]], ids=["none", "few", "a gap"])
def test_a_step_that_nobody_has_is_named(redis_url: str, tmp_path: Path, there: list[LedgerEntry]) -> None:
    if there:
        write(tmp_path, there)
    committed = CommittedSteps(restored(redis_url).ledger, tmp_path)
    lacking = next((step for step, entry in enumerate(there, 1) if entry.step != step), len(there) + 1)
    with pytest.raises(LedgerTrimmed, match=rf"begins at step {FIRST} in Redis; .*ledger.jsonl lacks step {lacking}$"):
        list(committed.pages(0))


def test_an_incomplete_last_line_is_no_step(redis_url: str, tmp_path: Path) -> None:
    write(tmp_path, entries(3))
    path = tmp_path / LEDGER
    path.write_bytes(path.read_bytes()[:-9])
    committed = CommittedSteps(restored(redis_url).ledger, tmp_path)
    assert [entry.step for entry in committed(0, 9)] == [1, 2]
    write(tmp_path, entries(5))  # its writer goes on
    assert [entry.step for entry in committed(2, 9)] == [3, 4, 5]


def test_the_last_step_is_read_again_without_those_before(redis_url: str, tmp_path: Path) -> None:
    """A critic asks again and again whether its last step is still there, also far behind the board's ledger."""
    write(tmp_path, entries(STEPS))
    committed = CommittedSteps(restored(redis_url).ledger, tmp_path)
    assert committed(5, 1) == entries(6)[5:]
    lines = (tmp_path / LEDGER).read_bytes().splitlines(keepends=True)
    earlier = b"".join(lines[:5])
    (tmp_path / LEDGER).write_bytes(b" " * len(earlier) + b"".join(lines[5:]))  # whoever begins there misses step 6
    for after in (5, 6, 6, 7):
        assert committed(after, 1) == entries(after + 1)[after:]


def test_the_books_of_a_board_with_a_short_ledger_are_right(redis_url: str) -> None:
    board = restored(redis_url, 3)
    audit(board)
