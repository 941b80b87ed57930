"""Exactly once, proven twice: every interleaving of a small model, and the same actions on the real scripts."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from relaxd.board import Board, Delivery, Fenced, NewGroup, Stage, StepConflict
from relaxd.config import BoardConfig
from tests.kit.boards import audit, end_leases, take
from tests.unit.board.commit_model import (
    MAX_DELIVERIES,
    Action,
    Model,
    Rules,
    State,
    can_end,
    check,
    explore,
    path_to,
)

STAGES = (Stage("rollout", needs=("prompt",), writes=("tokens",)), Stage("train", needs=("tokens",), writes=()))
DEPTH = 7
"""Actions after which the interleavings on the real board end: all of them up to here, and walks beyond."""
WALKS = 60


def test_every_interleaving_of_one_group_keeps_the_promises() -> None:
    model = Model(groups=("a",), saves=2)
    found = explore(model)
    assert found.states > 1000
    print(f"one group: {found.states} states, {found.moves} moves, at most {found.deepest} actions apart")
    stuck = [path_to(found, state) for state in found.reached if not can_end(model, state)]
    assert not stuck, f"a group that nobody can bring to an end, after {stuck[0]}"


@pytest.mark.slow
def test_every_interleaving_of_two_groups_keeps_the_promises() -> None:
    model = Model()
    found = explore(model)
    print(f"two groups: {found.states} states, {found.moves} moves, at most {found.deepest} actions apart")
    assert found.states > 50_000
    # That groups come to an end is shown with one: here a trainer may be refused a step of which one group was dropped,
    # and the model has no third trainer that would begin anew with the other, as a real one does.


def test_nobody_saves_work_of_a_group_that_another_holds() -> None:
    with pytest.raises(AssertionError, match="somebody else saved"):
        explore(Model(Rules(hold_is_checked=False), groups=("a",), saves=1), depth=5)


@pytest.mark.parametrize("rule", ["first_commit_wins", "hold_is_checked", "trainer_is_fenced", "closed_is_refused"])
def test_no_check_of_the_scripts_could_be_left_out(rule: str) -> None:
    with pytest.raises(AssertionError):
        explore(Model(Rules(**{rule: False}), groups=("a",)))


class RealBoard:
    """The model's actions, done to a board."""

    def __init__(self, url: str, number: int) -> None:
        limits = BoardConfig(max_deliveries=MAX_DELIVERIES, max_staleness=100, lease_seconds=1000)
        self.board = Board(url, f"run-{number}", STAGES, limits)
        self.board.create(term=1, groups_per_step=4, steps=100)
        self.board.set_gate(term=1, oldest_version=0, open=True)
        self.held: dict[str, Delivery] = {}
        self.saved: dict[str, str] = {}
        self.terms: dict[str, int] = {}
        self.taken: dict[str, set[str]] = {}

    def do(self, action: Action) -> tuple[Action, object]:
        """The action as it went (which group was taken is the stream's choice), and what its caller is told."""
        who = action.who
        match action.name:
            case "publish":
                return action, self.board.publish(term=1, groups=[NewGroup(action.group, {"prompt": "?"})])
            case "take":
                stream = f"{self.board.prefix}stage:rollout"
                (delivery,) = self.board._run(self.board._read(stream, "rollout", who, 1, None))
                self._hold(who, delivery)
                return action._replace(group=delivery.group_id), delivery.group_id
            case "claim":
                end_leases(self.board, "rollout", "one" if who == "two" else "two")
                for delivery in self.board._run(self.board._claim("rollout", who, 1)):
                    self._hold(who, delivery)
                    return action, delivery.group_id
                return action, None
            case "renew":
                return action, bool(self.board.renew("rollout", who, [self.held[who]]))
            case "save":
                part = {"tokens": np.array([len(who)], np.int32)}
                pointers = self.board.save(self.held[who], part, after=self.saved[who])
                self.saved[who] = self.saved[who] if pointers is None else pointers
                return action, pointers is not None
            case "commit":
                columns: dict[str, Any] = {"tokens": np.array([len(who)], np.int32)}
                return action, self.board.commit([(self.held.pop(who), columns)])[0]
            case "release":
                return action, bool(self.board.nack("rollout", who, [self.held.pop(who)], failed=True))
            case "drop":
                return action, self.board.drop(self.held.pop(who), reason="test")
            case "die":
                self.held.pop(who)
                return action, None
            case "begin":
                self.terms[who] = self.board.new_trainer_term()
                return action, self.terms[who]
            case "take_step":
                end_leases(self.board, "train", "first" if who == "second" else "second")
                got = {delivery.group_id for delivery in take(self.board, "train", who)}
                self.taken[who] = self.taken.get(who, set()) | got
                return action, tuple(sorted(got))
            case "commit_step":
                return action, self._commit_step(who)
        raise AssertionError(action)

    def _hold(self, who: str, delivery: Delivery) -> None:
        self.held[who], self.saved[who] = delivery, self.board.saved(delivery).pointers

    def _commit_step(self, who: str) -> str:
        plan = {"groups": sorted(self.taken.pop(who))}
        try:
            self.board.commit_step(term=self.terms[who], step=self.board.last_step() + 1, plan=plan, metrics={})
        except (Fenced, StepConflict) as error:
            return type(error).__name__
        return "ok"

    def holders(self, stage: str) -> dict[str, tuple[str, int]]:
        """Who holds each group at a stage, and how often it was delivered."""
        client: Any = self.board._connection.client
        stream = f"{self.board.prefix}stage:{stage}"
        entries = client.xrange(stream)
        pending = {entry: hold for entry, *hold in client.execute_command("XPENDING", stream, "workers", "-", "+", 100)}
        found = {}
        for entry_id, fields in entries:
            hold = pending.get(entry_id)
            before = int(fields.get(b"attempts", 0))
            holder, count = (hold[0].decode(), hold[2]) if hold else ("", 0)
            found[fields[b"group"].decode()] = (holder, before + count)
        return found

    def check(self, state: State) -> None:
        """That the board is as the model says."""
        audit(self.board)
        assert set(self.board.open_groups()) == state.open
        assert {dropped.group_id for dropped in self.board.dropped()} == state.dropped
        assert tuple(tuple(entry.plan["groups"]) for entry in self.board.ledger()) == state.ledger
        assert self.board.trainer_term() == state.trainer_term
        client, prefix = self.board._connection.client, self.board.prefix
        found = {group: client.hget(f"{prefix}group:{group}", "saved:rollout") for group in state.open}
        assert {group: len(pointers.split()) for group, pointers in found.items() if pointers} == dict(state.saved)
        for stage, expected in (("rollout", state.rollout), ("train", state.train)):
            assert self.holders(stage) == {group: (e.holder, e.deliveries) for group, e in expected}, stage


def run_on_a_board(url: str, number: int, model: Model, actions: Iterator[Action] | list[Action]) -> State:
    """Do actions to model and board, and compare after each. Ends early where the stream chose another group."""
    real, state, done = RealBoard(url, number), State(), []
    try:
        for wanted in actions:
            action, told = real.do(wanted)
            done.append(action)
            assert action in model.actions(state), f"{action} is not possible after {done}"
            state, expected = model.do(state, action)
            assert told == expected, f"the board says {told}, the model {expected}, after {done}"
            if action != wanted:
                break
        real.check(state)
        check(state)
    except AssertionError as error:
        raise AssertionError(f"{error}\nafter {done}") from error
    finally:
        real.board.delete()
        real.board.close()
    return state


@pytest.mark.slow
def test_the_scripts_do_what_the_model_says_in_every_short_interleaving(redis_url: str) -> None:
    model = Model(groups=("a",))
    found = explore(model, depth=DEPTH)
    paths = [path_to(found, state) for state in found.reached]
    moves = 0
    for path, state in zip(paths, found.reached, strict=True):
        for action in model.actions(state) if len(path) < DEPTH else ():
            moves += 1
            run_on_a_board(redis_url, moves, model, [*path, action])
    print(f"{moves} interleavings on a real board, all of at most {DEPTH} actions")
    assert moves > 500


def test_the_scripts_do_what_the_model_says_in_long_walks_with_two_groups(redis_url: str) -> None:
    model, rng = Model(saves=3), random.Random(5)
    for number in range(WALKS):
        real, state, done = RealBoard(redis_url, number), State(), []
        for _ in range(30):
            options = list(model.actions(state))
            if not options:
                break
            action, told = real.do(rng.choice(options))
            done.append(action)
            state, expected = model.do(state, action)
            assert told == expected, f"the board says {told}, the model {expected}, after {done}"
            real.check(state)
            check(state)
        real.board.delete()
        real.board.close()
