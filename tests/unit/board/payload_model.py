"""A small model of how large columns are written, kept and freed, and by whom, when anybody may stop anywhere.

It knows one group at one stage, two writers (the second may be a retry of the first, which has stalled), each with an
attempt of two slices, and two sweepers (the second replaces the first, which may have stalled). Time is left out: what
expires may expire at any moment, a registration may be overdue at any moment, and what Redis has received may arrive a
second time at any later moment, as what was sent on a connection that was given up does.

A crash is a process that does nothing any more: every state is looked at, so every crash between two steps is.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

WRITERS = ("one", "two")
SWEEPERS = ("first", "second")
SLICES = (0, 1)
ABSENT, EXPIRING, KEPT = "absent", "expiring", "kept"

Slice = tuple[str, int]
"""A writer, whose name is that of his attempt, too, and the number of a slice."""


@dataclass(frozen=True)
class State:
    """What Redis holds, and how far each process is."""

    open: bool = True
    pointer: str = ""
    """The attempt that the group points to."""
    pending: frozenset[str] = frozenset()
    garbage: frozenset[str] = frozenset()
    expiring: frozenset[Slice] = frozenset()
    kept: frozenset[Slice] = frozenset()
    step: tuple[tuple[str, int], ...] = tuple((writer, 0) for writer in WRITERS)
    """0: not begun; 1: registered, or refused; 2 and 3: so many slices less one are written; 4: has an answer."""
    told: tuple[tuple[str, str], ...] = ()
    """What each writer's commit was told: won, lost, late."""
    sweeping: tuple[tuple[str, str, int], ...] = ()
    """(sweeper, attempt, slices freed) of those in the middle of a sweep."""
    again: frozenset[Slice] = frozenset()
    """Slices whose write may arrive a second time."""


class Action(NamedTuple):
    """Something that happens."""

    name: str
    who: str = ""
    slice: int = 0


@dataclass(frozen=True)
class Rules:
    """The protocol's rules. Each can be left out, to see that the invariants notice."""

    late_is_refused: bool = True
    """A commit needs its registration and all slices."""
    slices_expire: bool = True
    """Until a commit keeps them."""
    first_commit_wins: bool = True
    freed_before_forgotten: bool = True
    """A sweeper removes a pointer from the garbage after it has freed its payloads, not before."""
    written_once: bool = True
    """A write that arrives again leaves a slice that is there as it is (NX)."""
    kept_is_spared: bool = True
    """A registration of an attempt that was accepted is removed without it."""


class Model:
    """What each action does to a state, and when it is possible."""

    def __init__(self, rules: Rules | None = None, *, repeats: bool = True, sweepers: int = 2) -> None:
        """`repeats`: whether what the first writer sends may arrive again."""
        self.rules = rules or Rules()
        self.repeats = WRITERS[:1] if repeats else ()
        self.sweepers = SWEEPERS[:sweepers]

    def actions(self, state: State) -> Iterator[Action]:
        """Everything that may happen next."""
        steps = dict(state.step)
        for writer in WRITERS:
            match steps[writer]:
                case 0:
                    yield Action("register", writer)
                case 1 | 2:
                    yield Action("write", writer, steps[writer] - 1)
                case 3:
                    yield Action("commit", writer)
            if writer in state.pending:
                yield Action("overdue", writer)
            if steps[writer] >= 1 and writer in self.repeats and writer not in state.pending:
                yield Action("register_again", writer)
            if steps[writer] == 4 and writer in self.repeats:
                yield Action("commit_again", writer)
        for writer, number in sorted(state.expiring):
            yield Action("expire", writer, number)
        for writer, number in sorted(state.again):
            yield Action("arrive_again", writer, number)
        if state.open:
            yield Action("close")
        busy = {sweeper: (attempt, freed) for sweeper, attempt, freed in state.sweeping}
        for sweeper in self.sweepers:
            if sweeper not in busy:
                for attempt in sorted(state.garbage):
                    yield Action(f"sweep {attempt}", sweeper)
            elif busy[sweeper][1] < len(SLICES):
                yield Action("free", sweeper)
            else:
                yield Action("forget", sweeper)

    def do(self, state: State, action: Action) -> State:
        """Return the state afterwards."""
        name, _, attempt = action.name.partition(" ")
        if name == "sweep":
            return self._sweep(state, action.who, attempt)
        result: State = getattr(self, f"_{name}")(state, action)
        return result

    # --- writers

    def _register(self, state: State, action: Action) -> State:
        # A writer goes on though it is refused: it sends everything before it reads an answer. (One that waits for the
        # answer stops here, which is as if it had died.)
        wanted = state.open and not state.pointer
        state = _at(state, action.who, 1)
        return replace(state, pending=state.pending | {action.who}) if wanted else state

    def _register_again(self, state: State, action: Action) -> State:
        # As of a prompt's attempt, which has no group yet that could refuse it.
        if action.who in state.garbage:
            return state
        return replace(state, pending=state.pending | {action.who})

    def _write(self, state: State, action: Action) -> State:
        state = _at(state, action.who, dict(state.step)[action.who] + 1)
        state = self._store(state, (action.who, action.slice))
        return replace(state, again=state.again | {(action.who, action.slice)}) if action.who in self.repeats else state

    def _arrive_again(self, state: State, action: Action) -> State:
        one = (action.who, action.slice)
        return self._store(replace(state, again=state.again - {one}), one)

    def _store(self, state: State, one: Slice) -> State:
        if self.rules.written_once and one in state.kept | state.expiring:
            return state
        if self.rules.slices_expire:
            return replace(state, expiring=state.expiring | {one}, kept=state.kept - {one})
        return replace(state, kept=state.kept | {one})

    def _expire(self, state: State, action: Action) -> State:
        return replace(state, expiring=state.expiring - {(action.who, action.slice)})

    def _commit_again(self, state: State, action: Action) -> State:
        # Nobody hears the answer.
        return replace(self._commit(state, action), told=state.told) if state.pointer != action.who else state

    def _commit(self, state: State, action: Action) -> State:
        who = action.who
        state = _at(state, who, 4)
        if not state.open or (state.pointer and self.rules.first_commit_wins):
            return _tell(self._give_up(state, who), who, "lost")
        mine = {(who, number) for number in SLICES}
        if self.rules.late_is_refused:
            if who not in state.pending:
                return _tell(state, who, "late")
            state = replace(state, pending=state.pending - {who})
            present = []
            for number in SLICES:  # the script keeps one after the other, and stops at the first that is missing
                if (who, number) not in state.expiring | state.kept:
                    state = replace(state, garbage=state.garbage | {who})
                    break
                present.append((who, number))
            state = replace(state, kept=state.kept | set(present), expiring=state.expiring - set(present))
            if len(present) < len(SLICES):
                return _tell(state, who, "late")
        there = mine & (state.expiring | state.kept)
        state = replace(state, kept=state.kept | there, expiring=state.expiring - there, pending=state.pending - {who})
        return _tell(replace(state, pointer=who), who, "won")

    # --- whoever closes the group

    def _close(self, state: State, action: Action) -> State:
        garbage = state.garbage | ({state.pointer} if state.pointer else set())
        return replace(state, open=False, pointer="", garbage=garbage)

    # --- sweepers

    def _overdue(self, state: State, action: Action) -> State:
        return self._give_up(state, action.who)

    def _give_up(self, state: State, attempt: str) -> State:
        if attempt not in state.pending:
            return state
        state = replace(state, pending=state.pending - {attempt})
        if (attempt, 0) in state.kept and self.rules.kept_is_spared and self.rules.slices_expire:
            return state
        return replace(state, garbage=state.garbage | {attempt})

    def _sweep(self, state: State, sweeper: str, attempt: str) -> State:
        if not self.rules.freed_before_forgotten:
            state = replace(state, garbage=state.garbage - {attempt})
        return replace(state, sweeping=(*state.sweeping, (sweeper, attempt, 0)))

    def _free(self, state: State, action: Action) -> State:
        ((_, attempt, number),) = (one for one in state.sweeping if one[0] == action.who)
        others = tuple(one for one in state.sweeping if one[0] != action.who)
        freed = {(attempt, number)}
        state = replace(state, kept=state.kept - freed, expiring=state.expiring - freed)
        return replace(state, sweeping=(*others, (action.who, attempt, number + 1)))

    def _forget(self, state: State, action: Action) -> State:
        ((_, attempt, _),) = (one for one in state.sweeping if one[0] == action.who)
        others = tuple(one for one in state.sweeping if one[0] != action.who)
        return replace(state, sweeping=others, garbage=state.garbage - {attempt})


def _at(state: State, writer: str, step: int) -> State:
    return replace(state, step=tuple((who, step if who == writer else at) for who, at in state.step))


def _tell(state: State, writer: str, answer: str) -> State:
    return replace(state, told=tuple(sorted({**dict(state.told), writer: answer}.items())))


def check(state: State) -> None:
    """Check the promises. Raises AssertionError."""
    if state.open and state.pointer:
        mine = {(state.pointer, number) for number in SLICES}
        assert mine <= state.kept, f"a group points to what is gone, or will expire: {state}"
        assert state.pointer not in state.garbage, f"a group points to garbage: {state}"
    wins = [writer for writer, answer in state.told if answer == "won"]
    assert len(wins) <= 1, f"two commits won: {state}"
    assert not state.kept & state.expiring
    for attempt, _ in state.kept:
        known = attempt == state.pointer or attempt in state.garbage | state.pending
        assert known, f"leaked for ever: {attempt} in {state}"


def clears_up(model: Model, state: State) -> bool:
    """Whether everything that isn't needed goes away though every writer and the sweepers so far are dead."""
    state = replace(state, sweeping=(), again=frozenset())
    state = model.do(state, Action("close")) if state.open else state
    for attempt in sorted(state.pending):
        state = model.do(state, Action("overdue", attempt))
    for attempt in sorted(state.garbage):
        state = model.do(state, Action(f"sweep {attempt}", "second"))
        for name in ("free", "free", "forget"):
            state = model.do(state, Action(name, "second"))
    for writer, number in sorted(state.expiring):
        state = model.do(state, Action("expire", writer, number))
    return not (state.kept | state.expiring or state.pending or state.garbage)


class Exploration(NamedTuple):
    """What a search has visited."""

    moves: int
    reached: dict[State, tuple[State, Action] | None]
    """How each state was first come to."""


def explore(model: Model, *, seen: Callable[[State], None] = check, depth: int | None = None) -> Exploration:
    """Visit every state that any interleaving leads to, breadth first."""
    start = State()
    reached: dict[State, tuple[State, Action] | None] = {start: None}
    level, queue, moves = {start: 0}, deque([start]), 0
    while queue:
        state = queue.popleft()
        if depth is not None and level[state] >= depth:
            continue
        for action in model.actions(state):
            moves += 1
            after = model.do(state, action)
            if after not in reached:
                seen(after)
                reached[after] = (state, action)
                level[after] = level[state] + 1
                queue.append(after)
    return Exploration(moves, reached)


def path_to(exploration: Exploration, state: State) -> list[Action]:
    """Return the actions that first led to a state."""
    actions = []
    while (before := exploration.reached[state]) is not None:
        state, action = before
        actions.append(action)
    return actions[::-1]
