"""Any order of operations, by workers that die and wake up again, leaves the board consistent, every group reachable.

Every operation is a rule of its own, so that a worker may stop for ever, or be overtaken, between any two of them.
Every Delivery ever handed out stays in the game: a late one is a zombie's. Whether replies are lost is drawn too: then
every operation is done twice, as it is when its reply doesn't arrive.
"""

import contextlib
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from relaxd.board import BoardError, Delivery, Fenced, GateClosed, StepConflict, payload_transfer
from relaxd.board.attempts import Attempt, new_names
from relaxd.board.connection import RedisConnection
from relaxd.board.sides.side_base import GroupAttempt
from tests.kit.boards import LARGE, STAGES, audit, end_leases, group, make_board, make_overdue, output, take

NAMES = [stage.name for stage in STAGES]
WORKERS = ["one", "two", "three"]
MAX_DELIVERIES = 4
MAX_RETRIES = 2
ZOMBIE = st.sampled_from([False, False, False, True])

ACTIONS = [
    *("publish", "publish_a_retry", "publish_again", "replace_the_coordinator", "sync_weights"),
    *("take", "take", "die_or_stall", "commit", "commit", "work", "die_before_the_commit_script"),
    *("begin", "release", "renew", "drop", "load", "save", "save", "forget"),
    *("train", "replace_the_trainer", "train_some", "sweep", "redo"),
]


class ForgetfulConnection(RedisConnection):
    """Loses the reply of every operation and does it again."""

    def run(self, operation: Any) -> Any:
        super().run(operation)
        return super().run(operation)


class BoardMachine(RuleBasedStateMachine):
    url = ""

    @initialize(lossy=st.booleans())
    def create(self, lossy: bool) -> None:
        redis.Redis.from_url(self.url).flushdb()
        self.board = make_board(
            self.url, groups_per_step=3, max_deliveries=MAX_DELIVERIES, max_retries=MAX_RETRIES, lease_seconds=1000
        )
        if lossy:
            self.board._connection.__class__ = ForgetfulConnection
        self.published: dict[str, Any] = {}
        self.last_publish: list[Any] = []
        self.coordinator_term = 1
        self.trainer_terms = [self.board.new_trainer_term()]
        self.deliveries: dict[str, list[Delivery]] = {name: [] for name in NAMES}
        self.version = 0
        self.committed: dict[tuple[str, str], int] = {}
        self.known_saves: dict[str, str] = {}

    # --- the coordinator

    def publish(self, draw: Any) -> None:
        count = draw(st.integers(1, 3))
        self.try_to_publish([group(f"g{len(self.published) + i}") for i in range(count)], draw(ZOMBIE))

    def publish_a_retry(self, draw: Any) -> None:
        for retry in self.board.retries(1):
            assert retry.retries < MAX_RETRIES
            name = f"{retry.group_id.partition('~')[0]}~{retry.retries + 1}"
            self.try_to_publish([group(name, retry_of=retry.group_id)], draw(ZOMBIE))

    def publish_again(self, draw: Any) -> None:
        if self.last_publish:
            self.board.publish(term=self.coordinator_term, groups=self.last_publish)

    def try_to_publish(self, groups: list[Any], zombie: bool) -> None:
        counts = self.board.counts()
        room = (self.version + 1 + 1) * 3 - (counts.published - counts.dropped)
        try:
            cursor = len(self.published) + len(groups)
            self.board.publish(term=self.coordinator_term - zombie, groups=groups, cursor=cursor)
        except Fenced:
            assert zombie
        except GateClosed:
            assert not zombie
            assert len(groups) > room
        else:
            assert not zombie
            assert len(groups) <= room
            self.published.update({g.group_id: g for g in groups})
            self.last_publish = groups
            assert self.board.cursor() == len(self.published)

    def replace_the_coordinator(self, draw: Any) -> None:
        self.coordinator_term += 1
        self.board.create(term=self.coordinator_term, groups_per_step=3, steps=100)

    def sync_weights(self, draw: Any) -> None:
        self.version = self.board.last_step()
        self.board.set_gate(term=self.coordinator_term, oldest_version=self.version, open=True)

    # --- stages

    def take(self, draw: Any) -> None:
        stage = draw(st.sampled_from([d.stage for d in self.board.queues() if d.waiting + d.held] or NAMES))
        for delivery in take(self.board, stage, draw(st.sampled_from(WORKERS)), draw(st.integers(1, 4))):
            assert delivery.attempt >= 1
            forgiven = int(
                self.board._connection.client.hget(f"{self.board.prefix}group:{delivery.group_id}", f"forgiven:{stage}")
                or 0
            )
            assert delivery.attempt - forgiven <= MAX_DELIVERIES
            self.deliveries[stage].append(delivery)

    def die_or_stall(self, draw: Any) -> None:
        held = [d.stage for d in self.board.queues() if d.held]
        if held:
            end_leases(self.board, draw(st.sampled_from(held)), draw(st.sampled_from([*WORKERS, None])))

    def commit(self, draw: Any) -> None:
        stage, chosen = self.choose(draw, NAMES[:-1], most=4)
        tokens = draw(st.sampled_from([2, LARGE]))
        items = [(delivery, output(stage, version=self.version, tokens=tokens)) for delivery in chosen]
        for delivery, won in zip(chosen, self.board.commit(items), strict=True):
            key = (delivery.group_id, stage)
            self.committed[key] = self.committed.get(key, 0) + won
            assert self.committed[key] <= 1, "two commits won"

    def work(self, draw: Any) -> None:
        """A worker that lives commits what waits, up to a stage: so that later stages have something to do."""
        last = draw(st.integers(1, len(NAMES) - 1))
        for stage in NAMES[:last]:
            taken = take(self.board, stage, "living")
            self.deliveries[stage] += taken
            for delivery, won in zip(taken, self.board.commit([(d, output(stage)) for d in taken]), strict=True):
                self.committed[delivery.group_id, stage] = won

    def die_before_the_commit_script(self, draw: Any) -> None:
        stage, chosen = self.choose(draw, NAMES[:-1])
        for delivery in chosen:
            (name,) = new_names([delivery.group_id])
            attempt = Attempt(self.board.prefix, name, output(stage, tokens=LARGE))
            registering = self.board._register([GroupAttempt(delivery.group_id, stage, attempt)], 60_000)
            if not self.board._run(registering):
                self.board._run(payload_transfer.write([attempt], 60_000))

    def sweep(self, draw: Any) -> None:
        """The living coordinator sweeps, or one that has been replaced tries to; attempts may be overdue."""
        client = self.board._connection.client
        if draw(st.booleans()):
            make_overdue(self.board)
        if draw(ZOMBIE):
            with contextlib.suppress(Fenced):
                self.board.sweep(term=self.coordinator_term - 1)
        else:
            self.board.sweep(term=self.coordinator_term)
            assert not client.exists(f"{self.board.prefix}garbage")

    def begin(self, draw: Any) -> None:
        for delivery in self.choose(draw, ["rollout"])[1]:
            version = draw(st.integers(0, 5))
            if self.board.begin(delivery, version):
                assert self.board.open_versions()[delivery.group_id] == version
                assert delivery.attempt == self.newest(delivery).attempt

    def save(self, draw: Any) -> None:
        """A worker saves more of its unfinished work: one that lives knows all of it, a zombie what it knew."""
        for delivery in self.choose(draw, ["rollout"])[1]:
            before = self.board.saved(delivery)
            after = before.pointers if draw(st.booleans()) else self.known_saves.get(delivery.group_id, "")
            part = {"tokens": np.arange(draw(st.sampled_from([2, LARGE])), dtype=np.int32)}
            pointers = self.board.save(delivery, part, after=after, forgiven=draw(st.booleans()))
            now = self.board.saved(delivery)
            if pointers is None:
                assert now.pointers == before.pointers
                continue
            assert delivery.attempt == self.newest(delivery).attempt, "a zombie saved what another holds"
            assert after == before.pointers
            assert now.pointers == pointers
            assert len(now.parts) == len(before.parts) + 1
            assert not self.committed.get((delivery.group_id, "rollout"))
            self.known_saves[delivery.group_id] = before.pointers

    def forget(self, draw: Any) -> None:
        for delivery in self.choose(draw, ["rollout"])[1]:
            before = self.board.saved(delivery).pointers
            if before and self.board.forget_saved(delivery, before):
                assert delivery.attempt == self.newest(delivery).attempt
                assert not self.board.saved(delivery).parts

    def release(self, draw: Any) -> None:
        stage, chosen = self.choose(draw)
        for delivery in chosen:
            if self.board.nack(stage, delivery.consumer, [delivery], failed=draw(st.booleans())):
                assert delivery.attempt == self.newest(delivery).attempt
                self.deliveries[stage].remove(delivery)  # another of this attempt may come

    def renew(self, draw: Any) -> None:
        stage, chosen = self.choose(draw)
        for delivery in chosen:
            if self.board.renew(stage, delivery.consumer, [delivery]):
                assert delivery.attempt == self.newest(delivery).attempt
                assert not self.committed.get((delivery.group_id, stage))

    def drop(self, draw: Any) -> None:
        stage, chosen = self.choose(draw)
        for delivery in chosen:
            if self.board.drop(delivery, reason=f"at_{stage}", retry=draw(st.booleans())):
                assert delivery.attempt == self.newest(delivery).attempt, "a zombie dropped what another holds"

    def load(self, draw: Any) -> None:
        stage, chosen = self.choose(draw, most=4)
        needs = next(s.needs for s in STAGES if s.name == stage)
        for delivery, columns in zip(chosen, self.board.load(chosen, needs), strict=True):
            if delivery.group_id in self.board.open_groups():
                assert columns is not None
            else:
                assert columns is None

    # --- the trainer

    def train(self, draw: Any) -> None:
        """The trainer that lives takes what waits and commits the next step with it."""
        taken = take(self.board, "train", "trainer")
        self.deliveries["train"] += taken
        if taken:
            assert self.try_to_train([d.group_id for d in taken], self.trainer_terms[-1], ahead=1)

    def replace_the_trainer(self, draw: Any) -> None:
        self.trainer_terms.append(self.board.new_trainer_term())

    def redo(self, draw: Any) -> None:
        """The trainer, or a zombie, has the critic do its work on a group again."""
        stage, chosen = self.choose(draw, ["train"])
        for delivery in chosen:
            held = delivery.group_id in self.board.renew(stage, delivery.consumer, [delivery])
            self.board.redo(stage, delivery.consumer, [delivery], again="critic")
            key = f"{self.board.prefix}group:{delivery.group_id}"
            if held:
                assert not self.board._connection.client.hexists(key, "@critic")
                self.committed[delivery.group_id, "critic"] = 0

    def train_some(self, draw: Any) -> None:
        """The next step or a wrong one, by the trainer or a zombie, with groups that may have been closed."""
        known = list(self.published)
        if known:
            chosen = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
            term, ahead = draw(st.sampled_from(self.trainer_terms[-2:])), draw(st.sampled_from([1, 1, 1, 0, 2]))
            fine = set(chosen) <= set(self.board.open_groups()) and len(set(chosen)) == len(chosen)
            last = self.board.ledger()[-1:]
            again = ahead == 0 and any(e.plan["groups"] == chosen and e.term == term for e in last)
            assert self.try_to_train(chosen, term, ahead) == bool(
                ((fine and ahead == 1) or again) and term == self.trainer_terms[-1]
            )

    def try_to_train(self, chosen: list[str], term: int, ahead: int) -> bool:
        step, plan = self.board.last_step() + ahead, {"groups": chosen}
        try:
            self.board.commit_step(term=term, step=step, plan=plan, metrics={"loss": 1.0})
        except Fenced:
            assert term != self.trainer_terms[-1]
            return False
        except StepConflict:
            assert term == self.trainer_terms[-1]
            return False
        assert self.board.ledger()[-1].plan == plan
        return True

    # --- any of these, in any order

    @rule(data=st.data(), actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=4))
    def act(self, data: Any, actions: list[str]) -> None:
        for action in actions:
            getattr(self, action)(data.draw)
            self.holds()

    def choose(self, draw: Any, among: list[str] = NAMES, most: int = 1) -> tuple[str, list[Delivery]]:
        """A stage, and some of its deliveries, each of another group: late ones too."""
        stage = draw(st.sampled_from([name for name in among if self.deliveries[name]] or among[:1]))
        known = self.deliveries[stage][::-1]
        if not known:
            return stage, []
        return stage, draw(st.lists(st.sampled_from(known), min_size=1, max_size=most, unique_by=lambda d: d.group_id))

    def newest(self, delivery: Delivery) -> Delivery:
        """The last delivery of the same group at the same stage. (Attempts begin anew once a stage was redone.)"""
        return [d for d in self.deliveries[delivery.stage] if d.group_id == delivery.group_id][-1]

    # --- what always holds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "board"):
            return
        audit(self.board)
        counts = self.board.counts()
        assert counts.published == len(self.published), "a group was published twice, or not at all"
        trained = {id for entry in self.board.ledger() for id in entry.plan["groups"]}
        dropped = {d.group_id for d in self.board.dropped(1000)}
        assert trained | dropped | set(self.board.open_groups()) == set(self.published), "a group is lost"
        assert not trained & dropped
        assert len(dropped) == counts.dropped

    def teardown(self) -> None:
        """Living workers bring every group that is left to an end, and nothing stays behind."""
        if not hasattr(self, "board"):
            return
        self.board._connection.__class__ = RedisConnection
        left = set(self.board.open_groups())
        term = self.board.new_trainer_term()
        for stage in NAMES[:-1]:
            end_leases(self.board, stage)
            self.board.commit([(d, output(stage)) for d in take(self.board, stage)])
        found = [d.group_id for d in take(self.board, "train")]
        poisoned = {d.group_id for d in self.board.dropped(1000) if d.reason == "poison"}
        assert left - poisoned == set(found), "a group cannot be reached"
        self.board.commit_step(term=term, step=self.board.last_step() + 1, plan={"groups": found}, metrics={})
        self.holds()
        assert self.board.counts().open == 0
        assert all(depth.waiting == depth.held == 0 for depth in self.board.queues())
        waiting = {retry.group_id for retry in self.board.retries()}
        self.board.sweep(term=self.coordinator_term)
        keys = self.board._connection.client.keys(f"{self.board.prefix}columns:*")
        assert sum(self.board._connection.client.ttl(key) == -1 for key in keys) == len(waiting), "columns leaked"
        self.board.close()


@pytest.mark.timeout(120)
def test_the_board_is_consistent_whatever_happens(redis_url: str) -> None:
    machine = type("BoardMachine", (BoardMachine,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_an_unknown_error_of_a_script_is_a_board_error(redis_url: str) -> None:
    board = make_board(redis_url)
    board._connection.client.set(f"{board.prefix}open", "not a set")
    with pytest.raises(BoardError, match="WRONGTYPE"):
        board.publish(term=1, groups=[group("a")])
