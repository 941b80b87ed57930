"""groups.jsonl while a coordinator takes over from one that doesn't know it yet, in every order of what they do."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relaxd.board import Board, DropReason, Fenced, NewGroup, stages_for
from relaxd.board.types import GroupOutcome
from relaxd.config.data import CurriculumConfig
from relaxd.data.curriculum import run_curriculum
from relaxd.data.curriculum.prompt_record import PromptRecord
from relaxd.run_folder import GROUPS, closed_groups
from services.coordinator.runs.run_files import RunFiles
from tests.integration.scoring.processes import run_config

OLD_STEPS, NEW_STEPS = 5, 5
CLOSED_AT = 3
"""Where in the order one more group is closed."""


class Coordinator:
    """Moves fates to the folder, as a run's task does."""

    def __init__(self, board: Board, folder: Path, term: int) -> None:
        self.term = term
        self.seen: list[str] = []
        """The entries that it has counted."""
        self._board = board
        self._folder = folder
        self._files = RunFiles(folder)
        self._last = ""

    def take_over(self) -> Iterator[None]:
        """Begin the term, then read the folder."""
        self._board.create(term=self.term, groups_per_step=4, steps=9)
        yield
        self._last = run_curriculum.load(PromptRecord(10, CurriculumConfig()), self._folder)
        self.seen = [line["entry"] for line in closed_groups(self._folder)]
        if self._last:
            self._board.continue_fates(self._last, term=self.term)
        yield

    def move(self, *, dies: bool = False) -> Iterator[None]:
        """Read fates, append and forget them; `dies`: in the middle of a line."""
        fates = self._board.fates(self._last)
        yield
        if dies:
            self._append_half(fates)
        elif fates:
            self._files.append_groups(fates)
            self.seen += [fate.entry_id for fate in fates]
            self._last = fates[-1].entry_id
            yield
            self._board.forget_fates(self._last, term=self.term)
            yield

    def _append_half(self, fates: list[GroupOutcome]) -> None:
        text = "".join(json.dumps(fate.line) + "\n" for fate in fates)
        with (self._folder / GROUPS).open("a") as file:
            file.write(text[: len(text) * 2 // 3])


@pytest.fixture
def board(redis_url: str) -> Iterator[Board]:
    config = run_config()
    board = Board(redis_url, "run", stages_for(config), config.board)
    board.create(term=1, groups_per_step=4, steps=9)
    board.set_gate(term=1, oldest_version=0, open=True)
    yield board
    board.close()


def close_groups(board: Board, term: int, *names: str) -> list[str]:
    """Close groups. Returns the entries of their fates."""
    columns = {"prompt_tokens": np.arange(3, dtype=np.int32), "prompt": {"text": "?", "answer": "2"}}
    board.publish(term=term, groups=[NewGroup(name, columns) for name in names])
    board.drop_groups(names, term=term, reason=DropReason.STALE, counts="")
    return [fate.entry_id for fate in board.fates()][-len(names) :]


def orders(first: int, second: int) -> Iterator[tuple[bool, ...]]:
    """Yield every order of the steps of two: whether each is the second's."""
    for places in itertools.combinations(range(first + second), second):
        yield tuple(number in places for number in range(first + second))


@pytest.mark.parametrize(("dies", "old_steps"), [(False, OLD_STEPS), (True, 2)])
def test_nothing_is_lost_or_counted_twice(board: Board, tmp_path: Path, dies: bool, old_steps: int) -> None:
    for number, order in enumerate(orders(old_steps, NEW_STEPS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        old, new = Coordinator(board, folder, 2 * number + 2), Coordinator(board, folder, 2 * number + 3)
        list(old.take_over())
        entries = close_groups(board, old.term, f"{number}-1", f"{number}-2")
        of_old = itertools.chain(old.move(dies=dies), *([] if dies else [old.move()]))
        of_new = itertools.chain(new.take_over(), new.move(), new.move(), new.move())
        begun = False
        for place, is_new in enumerate(order):
            if place == CLOSED_AT:
                entries += close_groups(board, new.term if begun else old.term, f"{number}-3")
            begun |= is_new
            if is_new:
                next(of_new)
                continue
            try:
                next(of_old, None)
            except Fenced:
                assert begun
                of_old = itertools.chain()
        list(of_new)
        lines = list(closed_groups(folder))
        assert [line["entry"] for line in lines] == new.seen == entries, order
        assert [line["group"] for line in lines] == [f"{number}-{one}" for one in (1, 2, 3)], order
        assert board.fates(entries[-1]) == []
        board.forget_fates(entries[-1], term=new.term)


def test_entries_go_on_above_those_of_a_redis_that_was_lost(board: Board, tmp_path: Path) -> None:
    """The clock of the new one is behind."""
    future = "9999999999999-7"
    files = RunFiles(tmp_path)
    files.append_groups([GroupOutcome(future, {"group": "0-1"})])
    close_groups(board, 1, "0-0")
    board.forget_fates(board.fates()[-1].entry_id, term=1)
    for _ in range(2):  # also if it is repeated
        board.continue_fates(future, term=1)
    assert board.fates() == []
    (entry,) = close_groups(board, 1, "0-1")
    assert board.fates(future) == board.fates()
    files.append_groups(board.fates(future))
    assert [line["entry"] for line in closed_groups(tmp_path)] == [future, entry]
    board.continue_fates(future, term=1)  # a later coordinator
    assert [fate.entry_id for fate in board.fates(future)] == [entry]


def test_a_coordinator_that_was_replaced_forgets_nothing(board: Board) -> None:
    (entry,) = close_groups(board, 1, "0-0")
    board.create(term=2, groups_per_step=4, steps=9)
    with pytest.raises(Fenced):
        board.forget_fates(entry, term=1)
    with pytest.raises(Fenced):
        board.continue_fates(entry, term=1)
    assert [fate.entry_id for fate in board.fates()] == [entry]
