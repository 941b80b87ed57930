"""No payload is lost and none leaks: every interleaving of a small model, and the same actions on the real scripts."""

import random
from typing import Any

import numpy as np
import pytest

from relaxd.board import NewGroup, Stage
from relaxd.board import attempts as attempts
from relaxd.board.scripts import run_script
from relaxd.board.sides.side_base import GroupAttempt
from tests.kit.boards import audit, make_board, payload_keys
from tests.unit.board.payload_model import (
    SLICES,
    WRITERS,
    Action,
    Model,
    Rules,
    State,
    check,
    clears_up,
    explore,
    path_to,
)

STAGES = (Stage("rollout", needs=("prompt",), writes=("tokens",)), Stage("train", needs=("tokens",), writes=()))
DEPTH = 6
"""Actions after which the interleavings on the real board end: all of them up to here, and walks beyond."""
WALKS = 40
ANSWERS = {1: "won", 0: "lost", -1: "late"}


@pytest.mark.parametrize(
    ("repeats", "sweepers", "states"),
    [
        (False, 1, 8_912),
        pytest.param(True, 1, 41_517, marks=pytest.mark.slow),
        pytest.param(False, 2, 100_940, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_keeps_the_promises(repeats: bool, sweepers: int, states: int) -> None:
    model = Model(repeats=repeats, sweepers=sweepers)
    found = explore(model)
    assert len(found.reached) == states, "the model has changed: look whether it still has what it should"
    if sweepers == 1:
        left = [path_to(found, state) for state in found.reached if not clears_up(model, state)]
        assert not left, f"something stays for ever, after {left[0]}"


@pytest.mark.parametrize("rule", sorted(Rules.__dataclass_fields__))
def test_no_rule_could_be_left_out(rule: str) -> None:
    with pytest.raises(AssertionError):
        explore(Model(Rules(**{rule: False}), sweepers=1))


class RealBoard:
    """The model's actions, done to a board."""

    def __init__(self, url: str, number: int) -> None:
        self.board = make_board(url, run_id=f"run-{number}", stages=STAGES)
        self.client, self.prefix = self.board._connection.client, self.board.prefix
        self.board.publish(term=1, groups=[NewGroup("g", {"prompt": "?"})])
        columns = {"tokens": np.arange(24, dtype=np.int32)}
        self.attempts = {
            writer: attempts.Attempt(self.prefix, f"g.{writer}", columns, large_bytes=64) for writer in WRITERS
        }
        self.slices = {writer: [one[1:] for one in attempt.slices()] for writer, attempt in self.attempts.items()}
        assert all(len(slices) == len(SLICES) for slices in self.slices.values())
        self.sweeping: dict[str, tuple[str, int]] = {}
        self.told: dict[str, str] = {}

    def do(self, action: Action) -> None:
        """Do an action."""
        name, _, attempt = action.name.partition(" ")
        who = action.who
        match name:
            case "register":
                one = GroupAttempt("g", "rollout", self.attempts[who])
                self.board._run(self.board._register([one], 1_000_000))
            case "register_again":
                one = GroupAttempt("g", "publish", self.attempts[who])
                self.board._run(self.board._register([one], 1_000_000))
            case "write" | "arrive_again":
                key, data = self.slices[who][action.slice]
                self.client.execute_command("SET", key, data, "NX", "PX", 1_000_000)
            case "commit" | "commit_again":
                mine = self.attempts[who]
                arguments = ("g", "rollout", mine.pointer, mine.shared, "", "", "")
                answer = ANSWERS[self._script("commit", self.board._routes, *arguments)[0]]
                if name == "commit":
                    self.told[who] = answer
            case "overdue":
                self.client.zadd(f"{self.prefix}pending", {self.attempts[who].pointer: 1})
                self._script("sweep", 1, 100)
            case "expire":
                key, _ = self.slices[who][action.slice]
                assert self.client.ttl(key) > 0
                self.client.delete(key)
            case "close":
                assert self.board.drop_groups(["g"], term=1, reason="test")
            case "sweep":
                self.sweeping[who] = (attempt, 0)
            case "free":
                swept, number = self.sweeping[who]
                self.client.unlink(self.slices[swept][number][0])
                self.sweeping[who] = (swept, number + 1)
            case "forget":
                pointer = self.attempts[self.sweeping.pop(who)[0]].pointer
                self.client.unlink(payload_keys(self.prefix, pointer)[0])
                self._script("sweep", 1, 100, pointer)
            case _:
                raise AssertionError(action)

    def _script(self, name: str, *arguments: Any) -> Any:
        return self.board._run(run_script(name, self.prefix, *arguments))

    def check(self, state: State) -> None:
        """Check that the board is as the model says."""
        names = {attempt.pointer.encode(): writer for writer, attempt in self.attempts.items()}
        pending = {names[pointer] for pointer in self.client.zrange(f"{self.prefix}pending", 0, -1)}
        garbage = {names.get(pointer, "prompt") for pointer in self.client.smembers(f"{self.prefix}garbage")}
        assert (pending, garbage - {"prompt"}) == (state.pending, state.garbage)
        seconds = {
            (writer, number): self.client.ttl(key)
            for writer, slices in self.slices.items()
            for number, (key, _) in enumerate(slices)
        }
        assert {one for one, ttl in seconds.items() if ttl == -1} == state.kept
        assert {one for one, ttl in seconds.items() if ttl > 0} == state.expiring
        assert (self.board.open_groups() == ["g"]) == state.open
        pointer = self.client.hget(f"{self.prefix}group:g", "@rollout")
        assert (names[pointer] if pointer else "") == state.pointer
        assert self.told == dict(state.told)
        if not self.sweeping:  # else a part of what is garbage has gone
            audit(self.board)

    def end(self) -> None:
        """Remove the run."""
        self.board.delete()
        self.board.close()


@pytest.fixture
def two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut 96 bytes of tokens into two slices."""
    monkeypatch.setattr(attempts, "SLICE_BYTES", 64)


@pytest.mark.slow
@pytest.mark.usefixtures("two_slices")
def test_the_scripts_do_what_the_model_says_in_every_short_interleaving(redis_url: str) -> None:
    model = Model(sweepers=1)
    found = explore(model, depth=DEPTH)
    for number, state in enumerate(found.reached):
        path = path_to(found, state)
        real = RealBoard(redis_url, number)
        for action in path:
            real.do(action)
        try:
            real.check(state)
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter {path}") from error
        finally:
            real.end()
    assert len(found.reached) > 300


@pytest.mark.usefixtures("two_slices")
def test_the_scripts_do_what_the_model_says_in_long_walks(redis_url: str) -> None:
    model, rng = Model(sweepers=1), random.Random(6)
    for number in range(WALKS):
        real, state, done = RealBoard(redis_url, number), State(), []
        for _ in range(25):
            options = list(model.actions(state))
            # Closing the group early leaves little to see.
            options = [option for option in options if option.name != "close" or rng.random() < 0.2] or options
            action = rng.choice(options)
            done.append(action)
            real.do(action)
            state = model.do(state, action)
            check(state)
            try:
                real.check(state)
            except AssertionError as error:
                raise AssertionError(f"{error}\nafter {done}") from error
        real.end()
