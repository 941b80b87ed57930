"""Any order of operations, by workers that die and wake up again, leaves the board consistent, every group reachable.

Every operation is a rule of its own, so that a worker may stop for ever, or be overtaken, between any two of them.
Every Delivery ever handed out stays in the game: a late one is a zombie's. Whether replies are lost is drawn too: then
every operation is done twice, as it is when its reply doesn't arrive.
"""

from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from relaxd.board import BoardError, Delivery, Fenced, GateClosed, StepConflict, payloads
from relaxd.board.connection import Connection
from tests.boards import LARGE, STAGES, audit, end_leases, group, make_board, output, take

NAMES = [stage.name for stage in STAGES]
WORKERS = ["one", "two", "three"]
MAX_DELIVERIES = 4
MAX_RETRIES = 2
ZOMBIE = st.sampled_from([False, False, False, True])


def known(stage: str) -> Any:
    """Only when somebody has, or had, a group at this stage."""
    return precondition(lambda self: self.deliveries[stage])


anything_known = precondition(lambda self: any(self.deliveries.values()))
anything_open = precondition(lambda self: self.published and self.board.counts().open)


class ForgetfulConnection(Connection):
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
        self.coordinator_epoch = 1
        self.trainer_epochs = [self.board.new_trainer_epoch()]
        self.deliveries: dict[str, list[Delivery]] = {name: [] for name in NAMES}
        self.version = 0
        self.committed: dict[tuple[str, str], int] = {}

    # --- the coordinator

    @rule(count=st.integers(1, 3), old=ZOMBIE)
    def publish(self, count: int, old: bool) -> None:
        groups = [group(f"g{len(self.published) + i}") for i in range(count)]
        self.try_to_publish(groups, self.coordinator_epoch - old)

    @precondition(lambda self: self.board.retries(1))
    @rule(old=ZOMBIE)
    def publish_a_retry(self, old: bool) -> None:
        for retry in self.board.retries(1):
            assert retry.retries < MAX_RETRIES
            name = f"{retry.group_id.partition('~')[0]}~{retry.retries + 1}"
            self.try_to_publish([group(name, retry_of=retry.group_id)], self.coordinator_epoch - old)

    @precondition(lambda self: self.last_publish)
    @rule()
    def publish_again(self) -> None:
        self.board.publish(epoch=self.coordinator_epoch, groups=self.last_publish)

    def try_to_publish(self, groups: list[Any], epoch: int) -> None:
        counts = self.board.counts()
        room = (self.version + 1 + 1) * 3 - (counts.published - counts.dropped)
        try:
            self.board.publish(epoch=epoch, groups=groups, cursor=len(self.published) + len(groups))
        except Fenced:
            assert epoch < self.coordinator_epoch
        except GateClosed:
            assert epoch == self.coordinator_epoch
            assert len(groups) > room
        else:
            assert epoch == self.coordinator_epoch
            assert len(groups) <= room
            self.published.update({g.group_id: g for g in groups})
            self.last_publish = groups
            assert self.board.cursor() == len(self.published)

    @rule()
    def replace_the_coordinator(self) -> None:
        self.coordinator_epoch += 1
        self.board.create(epoch=self.coordinator_epoch, groups_per_step=3, steps=100)

    @rule()
    def sync_weights(self) -> None:
        self.version = self.board.last_step()
        self.board.set_gate(epoch=self.coordinator_epoch, oldest_version=self.version, open=True)

    # --- stages

    @anything_open
    @rule(data=st.data(), worker=st.sampled_from(WORKERS), count=st.integers(1, 4))
    def take(self, data: Any, worker: str, count: int) -> None:
        stage = data.draw(st.sampled_from([d.stage for d in self.board.queues() if d.waiting + d.held]))
        for delivery in take(self.board, stage, worker, count):
            assert 1 <= delivery.attempt <= MAX_DELIVERIES
            self.deliveries[stage].append(delivery)

    @anything_open
    @rule(data=st.data())
    def die_or_stall(self, data: Any) -> None:
        held = [d.stage for d in self.board.queues() if d.held]
        if held:
            end_leases(self.board, data.draw(st.sampled_from(held)), data.draw(st.sampled_from([*WORKERS, None])))

    @anything_known
    @rule(count=st.integers(1, 4), data=st.data())
    def commit(self, count: int, data: Any) -> None:
        stage = self.draw_stage(data, NAMES[:-1])
        chosen = self.choose(stage, data, count)
        large = data.draw(st.booleans())
        results = self.board.commit(
            [(d, output(stage, version=self.version, tokens=LARGE if large else 2)) for d in chosen]
        )
        for delivery, won in zip(chosen, results, strict=True):
            key = (delivery.group_id, stage)
            self.committed[key] = self.committed.get(key, 0) + won
            assert self.committed[key] <= 1, "two commits won"

    @anything_open
    @rule(last=st.sampled_from(NAMES[:-1]))
    def work(self, last: str) -> None:
        """A worker that lives commits what waits, up to a stage: so that later stages have something to do."""
        for stage in NAMES[: NAMES.index(last) + 1]:
            taken = take(self.board, stage, "living")
            self.deliveries[stage] += taken
            for delivery, won in zip(taken, self.board.commit([(d, output(stage)) for d in taken]), strict=True):
                self.committed[delivery.group_id, stage] = won

    @anything_known
    @rule(data=st.data())
    def die_before_the_commit_script(self, data: Any) -> None:
        stage = self.draw_stage(data, NAMES[:-1])
        for delivery in self.choose(stage, data):
            attempt = payloads.Attempt(self.board.prefix, delivery.group_id, output(stage))
            self.board._connection.pipeline(lambda pipe, a=attempt: payloads.write(pipe, [a], 60))

    @known("rollout")
    @rule(data=st.data(), version=st.integers(0, 5))
    def begin(self, data: Any, version: int) -> None:
        for delivery in self.choose("rollout", data):
            if self.board.begin(delivery, version):
                assert self.board.open_versions()[delivery.group_id] == version

    @anything_known
    @rule(failed=st.booleans(), data=st.data())
    def release(self, failed: bool, data: Any) -> None:
        stage = self.draw_stage(data)
        for delivery in self.choose(stage, data):
            self.board.release(stage, delivery.consumer, [delivery], failed=failed)

    @anything_known
    @rule(data=st.data())
    def renew(self, data: Any) -> None:
        stage = self.draw_stage(data)
        for delivery in self.choose(stage, data):
            held = self.board.renew(stage, delivery.consumer, [delivery])
            newest = max(
                (d for d in self.deliveries[stage] if d.group_id == delivery.group_id), key=lambda d: d.attempt
            )
            if held:
                assert delivery.attempt == newest.attempt
                assert (delivery.group_id, stage) not in {key for key, won in self.committed.items() if won}

    @anything_known
    @rule(retry=st.booleans(), data=st.data())
    def drop(self, retry: bool, data: Any) -> None:
        stage = self.draw_stage(data)
        for delivery in self.choose(stage, data):
            if self.board.drop(delivery, reason=f"at_{stage}", retry=retry):
                assert delivery.attempt == self.newest(delivery).attempt, "a zombie dropped what another holds"

    @anything_known
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        stage = self.draw_stage(data)
        chosen = self.choose(stage, data, 4)
        needs = next(s.needs for s in STAGES if s.name == stage)
        for delivery, columns in zip(chosen, self.board.load(chosen, needs), strict=True):
            assert (columns is None) == (delivery.group_id not in self.board.open_groups())

    def newest(self, delivery: Delivery) -> Delivery:
        """The last delivery of the same group at the same stage."""
        same = [d for d in self.deliveries[delivery.stage] if d.group_id == delivery.group_id]
        return max(same, key=lambda d: d.attempt)

    # --- the trainer

    @precondition(lambda self: self.published and self.board._connection.client.xlen(f"{self.board.prefix}stage:train"))
    @rule()
    def train(self) -> None:
        """The trainer that lives takes what waits and commits the next step with it."""
        taken = take(self.board, "train", "trainer")
        self.deliveries["train"] += taken
        plan = {"groups": [d.group_id for d in taken]}
        self.board.commit_step(epoch=self.trainer_epochs[-1], step=self.board.last_step() + 1, plan=plan, metrics={})

    @rule()
    def replace_the_trainer(self) -> None:
        self.trainer_epochs.append(self.board.new_trainer_epoch())

    @known("train")
    @rule(data=st.data(), ahead=st.sampled_from([1, 1, 1, 0, 2]))
    def commit_step(self, data: Any, ahead: int) -> None:
        """The next step or a wrong one, with groups that may have been closed."""
        chosen = [d.group_id for d in self.choose("train", data, 3)]
        still_open = set(chosen) <= set(self.board.open_groups())
        if self.try_to_train(chosen, self.trainer_epochs[-1], self.board.last_step() + ahead):
            assert self.board.ledger()[-1].plan["groups"] == chosen
        else:
            assert ahead != 1 or not still_open

    @anything_open
    @precondition(lambda self: len(self.trainer_epochs) > 1)
    @rule(data=st.data())
    def a_late_trainer_wakes_up(self, data: Any) -> None:
        epoch = data.draw(st.sampled_from(self.trainer_epochs[:-1]))
        assert not self.try_to_train(self.board.open_groups()[:2], epoch, self.board.last_step() + 1)

    @precondition(lambda self: self.board.last_step())
    @rule(data=st.data())
    def train_again(self, data: Any) -> None:
        trained = [id for entry in self.board.ledger() for id in entry.plan["groups"]]
        chosen = [*self.board.open_groups()[:1], data.draw(st.sampled_from(trained))] if trained else ["nosuch"]
        assert not self.try_to_train(chosen, self.trainer_epochs[-1], self.board.last_step() + 1)

    def try_to_train(self, chosen: list[str], epoch: int, step: int) -> bool:
        try:
            self.board.commit_step(epoch=epoch, step=step, plan={"groups": chosen}, metrics={"loss": 1.0})
        except Fenced:
            assert epoch != self.trainer_epochs[-1]
            return False
        except StepConflict:
            assert epoch == self.trainer_epochs[-1]
            return False
        return True

    def draw_stage(self, data: Any, among: list[str] = NAMES) -> str:
        """One of these stages, where somebody has or had a group, if there is one."""
        return data.draw(st.sampled_from([name for name in among if self.deliveries[name]] or among[:1]))

    def choose(self, stage: str, data: Any, most: int = 1) -> list[Delivery]:
        """Some deliveries of a stage, each of another group; the late ones too."""
        known = self.deliveries[stage]
        if not known:
            return []
        newest_first = st.integers(0, len(known) - 1).map(lambda i: known[-1 - i])
        return data.draw(st.lists(newest_first, min_size=1, max_size=most, unique_by=lambda d: d.group_id))

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
        self.board._connection.__class__ = Connection
        left = set(self.board.open_groups())
        epoch = self.board.new_trainer_epoch()
        for stage in NAMES[:-1]:
            end_leases(self.board, stage)
            self.board.commit([(d, output(stage)) for d in take(self.board, stage)])
        found = [d.group_id for d in take(self.board, "train")]
        poisoned = {d.group_id for d in self.board.dropped(1000) if d.reason == "poison"}
        assert left - poisoned == set(found), "a group cannot be reached"
        self.board.commit_step(epoch=epoch, step=self.board.last_step() + 1, plan={"groups": found}, metrics={})
        self.holds()
        assert self.board.counts().open == 0
        assert all(depth.waiting == depth.held == 0 for depth in self.board.queues())
        waiting = {retry.group_id for retry in self.board.retries()}
        keys = self.board._connection.client.keys(f"{self.board.prefix}columns:*")
        assert sum(self.board._connection.client.ttl(key) == -1 for key in keys) == len(waiting), "columns leaked"
        self.board.close()


@pytest.mark.timeout(120)
def test_the_board_is_consistent_whatever_happens(redis_url: str) -> None:
    machine = type("BoardMachine", (BoardMachine,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_an_unknown_error_of_a_script_is_a_board_error(redis_url: str) -> None:
    board = make_board(redis_url)
    board._connection.client.set(f"{board.prefix}open", "not a set")
    with pytest.raises(BoardError, match="WRONGTYPE"):
        board.publish(epoch=1, groups=[group("a")])
