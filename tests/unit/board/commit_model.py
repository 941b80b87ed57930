"""A small model of the board's promises: who holds a group, whose commit counts, which step trained it.

It knows two groups, a rollout stage with two workers, one trainer that is replaced once, and what can go wrong: a
worker that dies, one that stalls for longer than its lease and commits late, a trainer that stalls and commits under an
term that is over. Time is left out: a lease may end whenever its holder does nothing, which is every order there is.

The state is a plain tuple and an action is a plain function, so that every interleaving can be visited, and so that the
same actions can be done to a real board (`test_commit_model`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

GROUPS = ("a", "b")
WORKERS = ("one", "two")
TRAINERS = ("first", "second")
MAX_DELIVERIES = 3


@dataclass(frozen=True)
class Entry:
    """A group's place in a stage's stream."""

    number: int
    """Grows with each new entry of the group: a late hold of an earlier entry is none."""
    holder: str = ""
    """Who holds it; empty: it waits."""
    deliveries: int = 0
    """Over all entries."""


class Hold(NamedTuple):
    """What a worker believes to hold."""

    group: str
    number: int
    attempt: int
    saved: int = 0
    """Parts of the unfinished work that it knows to be saved."""


@dataclass(frozen=True)
class State:
    """Everything that the scripts know, and what each process believes."""

    published: frozenset[str] = frozenset()
    rollout: tuple[tuple[str, Entry], ...] = ()
    """Groups at the rollout stage."""
    train: tuple[tuple[str, Entry], ...] = ()
    """Groups at the train stage."""
    winner: tuple[tuple[str, str], ...] = ()
    """Whose columns a group has: "worker/attempt"."""
    wins: tuple[tuple[str, int], ...] = ()
    """How many commits of a group were told that they were the first."""
    saved: tuple[tuple[str, int], ...] = ()
    """How many parts of a group's unfinished work are saved."""
    dropped: frozenset[str] = frozenset()
    ledger: tuple[tuple[str, ...], ...] = ()
    """The groups of each step."""
    committed_by: tuple[tuple[int, int], ...] = ()
    """For each step: the term that committed it, and the newest term then."""
    trainer_term: int = 0
    holds: tuple[tuple[str, Hold], ...] = ()
    """What each worker believes to hold (it may have lost it)."""
    dead: frozenset[str] = frozenset()
    terms: tuple[tuple[str, int], ...] = ()
    """The term that each trainer got."""
    taken: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The groups that each trainer has taken."""

    @property
    def open(self) -> frozenset[str]:
        return self.published - self.dropped - {group for step in self.ledger for group in step}


class Action(NamedTuple):
    """Something that a process does."""

    name: str
    who: str = ""
    group: str = ""


@dataclass(frozen=True)
class Rules:
    """The scripts' checks. Each can be left out, to see that the invariants notice."""

    first_commit_wins: bool = True
    hold_is_checked: bool = True
    """A drop, renewal or hand-back needs the very delivery that holds the group."""
    trainer_is_fenced: bool = True
    closed_is_refused: bool = True
    """A step names open groups only."""


def _with(pairs: tuple, key: str, value: object) -> tuple:  # type: ignore[type-arg]
    kept = {k: v for k, v in pairs if k != key}
    if value is not None:
        kept[key] = value
    return tuple(sorted(kept.items()))


class Model:
    """What each action does to a state, and to whom it is possible."""

    def __init__(self, rules: Rules | None = None, groups: tuple[str, ...] = GROUPS, saves: int = 0) -> None:
        """`saves` is the largest number of parts of a group's unfinished work."""
        self.rules = rules or Rules()
        self.groups = groups
        self.saves = saves

    def actions(self, state: State) -> Iterator[Action]:
        """Everything that may happen next."""
        for group in self.groups:
            if group not in state.published:
                yield Action("publish", group=group)
                break  # in order, as the coordinator does
        holds, rollout = dict(state.holds), dict(state.rollout)
        for worker in WORKERS:
            if worker in state.dead:
                continue
            if worker not in holds:
                for group, entry in rollout.items():
                    if entry.holder != worker:
                        yield Action("claim" if entry.holder else "take", worker, group)
                continue
            yield Action("renew", worker)
            yield Action("commit", worker)
            yield Action("release", worker)
            yield Action("drop", worker)
            if holds[worker].saved < self.saves:
                yield Action("save", worker)
            if not state.dead:
                yield Action("die", worker)
        terms, taken = dict(state.terms), dict(state.taken)
        for trainer in TRAINERS:
            if trainer not in terms:
                if trainer == TRAINERS[0] or TRAINERS[0] in terms:
                    yield Action("begin", trainer)
                continue
            if any(entry.holder != trainer for _, entry in state.train):
                yield Action("take_step", trainer)
            if taken.get(trainer):
                yield Action("commit_step", trainer)

    def do(self, state: State, action: Action) -> tuple[State, object]:
        """The state afterwards, and what the caller is told."""
        return getattr(self, f"_{action.name}")(state, action)  # type: ignore[no-any-return]

    # --- the coordinator

    def _publish(self, state: State, action: Action) -> tuple[State, object]:
        rollout = _with(state.rollout, action.group, Entry(1))
        return replace(state, published=state.published | {action.group}, rollout=rollout), [action.group]

    # --- a worker

    def _take(self, state: State, action: Action) -> tuple[State, object]:
        entry = dict(state.rollout)[action.group]
        if entry.holder and entry.deliveries >= MAX_DELIVERIES:
            return self._close_dropped(state, action.group), None
        held = Entry(entry.number, action.who, entry.deliveries + 1)
        hold = Hold(action.group, held.number, held.deliveries, dict(state.saved).get(action.group, 0))
        rollout, holds = _with(state.rollout, action.group, held), _with(state.holds, action.who, hold)
        return replace(state, rollout=rollout, holds=holds), action.group

    _claim = _take

    def _renew(self, state: State, action: Action) -> tuple[State, object]:
        hold = dict(state.holds)[action.who]
        return state, self._holds(state, action.who, hold)

    def _save(self, state: State, action: Action) -> tuple[State, object]:
        hold = dict(state.holds)[action.who]
        if not self._holds(state, action.who, hold) or hold.saved != dict(state.saved).get(hold.group, 0):
            return state, False
        hold = hold._replace(saved=hold.saved + 1)
        saved, holds = _with(state.saved, hold.group, hold.saved), _with(state.holds, action.who, hold)
        return replace(state, saved=saved, holds=holds), True

    def _commit(self, state: State, action: Action) -> tuple[State, object]:
        hold = dict(state.holds)[action.who]
        state = replace(state, holds=_with(state.holds, action.who, None))
        group = hold.group
        first = group in dict(state.rollout)  # at the stage still, so nobody has committed
        if group not in state.open or (self.rules.first_commit_wins and not first):
            return state, False
        if group not in dict(state.train):
            state = replace(state, train=_with(state.train, group, Entry(1)))
        winner = _with(state.winner, group, f"{action.who}/{hold.attempt}")
        wins = _with(state.wins, group, dict(state.wins).get(group, 0) + 1)
        state = replace(state, saved=_with(state.saved, group, None))
        return replace(state, rollout=_with(state.rollout, group, None), winner=winner, wins=wins), True

    def _release(self, state: State, action: Action) -> tuple[State, object]:
        hold = dict(state.holds)[action.who]
        held = self._holds(state, action.who, hold)
        state = replace(state, holds=_with(state.holds, action.who, None))
        if not held:
            return state, False
        if hold.attempt >= MAX_DELIVERIES:
            return self._close_dropped(state, hold.group), True
        back = Entry(hold.number + 1, "", hold.attempt)
        return replace(state, rollout=_with(state.rollout, hold.group, back)), True

    def _drop(self, state: State, action: Action) -> tuple[State, object]:
        hold = dict(state.holds)[action.who]
        held = self._holds(state, action.who, hold)
        state = replace(state, holds=_with(state.holds, action.who, None))
        if not held:
            return state, False
        return self._close_dropped(state, hold.group), True

    def _die(self, state: State, action: Action) -> tuple[State, object]:
        return replace(state, dead=state.dead | {action.who}, holds=_with(state.holds, action.who, None)), None

    def _holds(self, state: State, worker: str, hold: Hold) -> bool:
        if hold.group not in state.open:
            return False
        if not self.rules.hold_is_checked:
            return True
        entry = dict(state.rollout).get(hold.group)
        return entry is not None and (entry.holder, entry.number, entry.deliveries) == (
            worker,
            hold.number,
            hold.attempt,
        )

    def _close_dropped(self, state: State, group: str) -> State:
        return replace(
            state,
            dropped=state.dropped | {group},
            rollout=_with(state.rollout, group, None),
            train=_with(state.train, group, None),
            winner=_with(state.winner, group, None),
            saved=_with(state.saved, group, None),
        )

    # --- a trainer

    def _begin(self, state: State, action: Action) -> tuple[State, object]:
        term = state.trainer_term + 1
        train: dict[str, Entry] = {}
        dropped = []
        for group, entry in state.train:
            if not entry.holder:
                train[group] = entry
            elif entry.deliveries >= MAX_DELIVERIES:
                dropped.append(group)
            else:
                train[group] = Entry(entry.number + 1, "", entry.deliveries)
        state = replace(state, trainer_term=term, train=tuple(sorted(train.items())))
        for group in dropped:
            state = self._close_dropped(state, group)
        return replace(state, terms=_with(state.terms, action.who, term)), term

    def _take_step(self, state: State, action: Action) -> tuple[State, object]:
        others = [(group, entry) for group, entry in state.train if entry.holder != action.who]
        got = []
        for group, entry in others:
            if entry.holder and entry.deliveries >= MAX_DELIVERIES:
                state = self._close_dropped(state, group)
            else:
                held = Entry(entry.number, action.who, entry.deliveries + 1)
                state = replace(state, train=_with(state.train, group, held))
                got.append(group)
        mine = tuple(sorted({*dict(state.taken).get(action.who, ()), *got}))
        return replace(state, taken=_with(state.taken, action.who, mine or None)), tuple(got)

    def _commit_step(self, state: State, action: Action) -> tuple[State, object]:
        groups = dict(state.taken)[action.who]
        state = replace(state, taken=_with(state.taken, action.who, None))
        if self.rules.trainer_is_fenced and dict(state.terms)[action.who] != state.trainer_term:
            return state, "Fenced"
        if self.rules.closed_is_refused and not set(groups) <= state.open:
            return state, "StepConflict"
        terms = (dict(state.terms)[action.who], state.trainer_term)
        state = replace(state, ledger=(*state.ledger, groups), committed_by=(*state.committed_by, terms))
        for group in groups:
            state = replace(
                state,
                train=_with(state.train, group, None),
                rollout=_with(state.rollout, group, None),
                winner=_with(state.winner, group, None),
            )
        return state, "ok"


def check(state: State) -> None:
    """The promises. Raises AssertionError."""
    assert all(count == 1 for _, count in state.wins), f"two commits of one group were the first: {state}"
    assert all(by == newest for by, newest in state.committed_by), f"a step by a trainer that was replaced: {state}"
    trained = [group for step in state.ledger for group in step]
    assert len(trained) == len(set(trained)), f"trained twice: {trained}"
    assert not set(trained) & state.dropped, f"trained and dropped: {state}"
    assert len(state.published) == len(state.open) + len(trained) + len(state.dropped), f"lost or doubled: {state}"
    rollout, train = {group for group, _ in state.rollout}, {group for group, _ in state.train}
    assert rollout | train == state.open, f"an open group is nowhere, or a closed one is somewhere: {state}"
    assert not rollout & train, f"a group is at two stages, one of which needs the other: {state}"
    assert {group for group, _ in state.winner} == train, f"a group without columns, or with two: {state}"
    assert {group for group, _ in state.saved} <= rollout, f"unfinished work of a group that is finished: {state}"
    for worker, hold in state.holds:
        entry = dict(state.rollout).get(hold.group)
        if entry is not None and (entry.holder, entry.number, entry.deliveries) == (worker, hold.number, hold.attempt):
            saved = dict(state.saved).get(hold.group, 0)
            assert saved == hold.saved, f"somebody else saved work of a group that {worker} holds: {state}"


class Exploration(NamedTuple):
    """What a search has visited."""

    states: int
    moves: int
    deepest: int
    """Most actions until a state that had not been seen."""
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
            after, _ = model.do(state, action)
            if after not in reached:
                seen(after)
                reached[after] = (state, action)
                level[after] = level[state] + 1
                queue.append(after)
    return Exploration(len(reached), moves, max(level.values()), reached)


def can_end(model: Model, state: State) -> bool:
    """Whether workers that live bring every open group to an end: no group is stuck for ever."""
    # Whoever has something finishes it; then others take.
    order = ("commit", "commit_step", "publish", "begin", "take", "claim", "take_step")
    for _ in range(100):
        if state.published == set(model.groups) and not state.open:
            return True
        newest = max(dict(state.terms).items(), key=lambda item: item[1], default=("", 0))[0]
        options = [
            action
            for action in model.actions(state)
            if action.name in order and (action.name != "take_step" or action.who == newest)
        ]
        if not options:
            return False
        state, _ = model.do(state, min(options, key=lambda action: order.index(action.name)))
    return False


def path_to(exploration: Exploration, state: State) -> list[Action]:
    """The actions that first led to a state."""
    actions = []
    while (step := exploration.reached[state]) is not None:
        state, action = step
        actions.append(action)
    return actions[::-1]
