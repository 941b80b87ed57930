"""A Redis Cluster: whose keys are on which node, what happens when they move, what is waited for, what is refused."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from benchmarks.failover import campaign
from relaxd.board import AsyncBoard, Board, BoardError, BoardUnavailable, NewGroup, RunMissing
from relaxd.config import LARGE_COLUMN_BYTES, BoardConfig
from relaxd.redis_client import COORDINATOR, key_prefix, parse
from relaxd.redis_client.lookups import OwnerLookup, mark_key, slot_of
from relaxd.rpc.leader_term import TERM_KEY, RedisTerm
from services.coordinator import __main__ as program
from services.coordinator.state.records import Phase, RunRecord
from services.coordinator.state.store import Store, StoreUnavailable
from tests.kit.boards import LARGE, STAGES, advance, audit, group, make_board, take
from tests.kit.redis.clusters import DOWN_MILLISECONDS, ClusterServers
from tests.kit.redis.redis_server import RedisServer
from tests.kit.waiting import wait_until

PATIENCE = 60.0
ALL = ("rollout", "reward", "critic", "advantage")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    cluster = ClusterServers(tmp_path_factory.mktemp("cluster"), replicated=("run",))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def keys_on(server: RedisServer) -> set[str]:
    with redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=10.0) as client:
        return {key for key in client.keys("*") if not key.startswith("relaxd-test:")}


def others(servers: ClusterServers, *not_these: RedisServer) -> list[RedisServer]:
    """The primaries but for these."""
    return [one for one in servers.primaries if one not in not_these]


def train_a_step(board: Board) -> None:
    step = board.last_step() + 1
    board.publish(term=1, groups=[group(f"{step}.{number}") for number in range(4)])
    advance(board, ALL, tokens=LARGE)
    plan = {"groups": sorted(delivery.group_id for delivery in take(board, "train", "trainer"))}
    board.commit_step(term=board.new_trainer_term(), step=step, plan=plan, metrics={})
    board.set_gate(term=1, oldest_version=step, open=True)


def test_each_run_is_on_the_node_of_its_slot(servers: ClusterServers) -> None:
    url = f"{servers.url}?wait_replicas=0"
    owners = others(servers)
    runs = {next(servers.tags_of(owner)): owner for owner in owners}
    boards = [make_board(url, run_id=run_id) for run_id in runs]
    for board in boards:
        train_a_step(board)
        board.publish(term=1, groups=[group("left")])
        audit(board)
    for board, owner in zip(boards, owners, strict=True):
        there = keys_on(owner)
        assert f"{board.prefix}ledger" in there
        assert not {key for key in there for one in boards if one is not board and key.startswith(one.prefix)}
        with redis.Redis.from_url(owner.url) as client:
            client.config_set("maxmemory", 10**9 + owner.port)
        assert board.memory().max_bytes == 10**9 + owner.port
        assert board.measure() > 1000
    boards[0].delete()
    assert not [key for key in keys_on(owners[0]) if key.startswith(boards[0].prefix)]
    with pytest.raises(RunMissing):
        boards[0].counts()
    for board in boards[1:]:
        train_a_step(board)
        audit(board)
        board.delete()


def test_large_columns_are_on_plain_data_nodes(servers: ClusterServers, redis_url: str) -> None:
    board = make_board(f"{servers.url}?wait_replicas=0", run_id="data", data_urls=(redis_url,))
    assert board.data_node_problems() == []
    board.publish(
        term=1, groups=[NewGroup("a", {"prompt_tokens": np.zeros(LARGE_COLUMN_BYTES), "prompt": {"text": "?"}})]
    )
    advance(board, ["rollout"], tokens=LARGE)
    audit(board)
    with redis.Redis.from_url(redis_url) as client:
        assert len(client.keys(f"{board.prefix}columns:*")) > 1
    board.delete()
    for node in servers.servers[:2]:
        (problem,) = make_board(
            f"{servers.url}?wait_replicas=0", run_id=f"data-{node.port}", data_urls=(node.url,)
        ).data_node_problems()
        assert "one server" in problem or "is a node of a Redis Cluster (cluster_enabled:1): name a server" in problem


def test_a_node_that_knows_no_better_is_not_asked_first_again(servers: ClusterServers) -> None:
    stale, owner, wrong = servers.primaries
    run_id = next(servers.tags_of(owner))
    url = f"redis+cluster://127.0.0.1:{stale.port},127.0.0.1:{owner.port}?wait_replicas=0"
    lookup = OwnerLookup(parse(url), run_id, {})

    def misled() -> bool:  # until the others tell it, within a second
        servers.ask(stale, "SETSLOT", slot_of(run_id), "NODE", servers.id_of(wrong))
        return lookup.find()[1] == wrong.port

    def refused() -> bool:
        misled()
        try:
            make_board(url, run_id=run_id, retry_seconds=0.0)
        except BoardUnavailable as error:
            return f"MOVED 127.0.0.1:{wrong.port} says of slot" in str(error)
        return False

    wait_until(refused, "the wrong node to refuse the run")
    wait_until(misled, "a lookup that is misled")
    lookup.mark_address_stale()
    assert lookup.find()[1] == owner.port
    make_board(url, run_id=run_id, retry_seconds=PATIENCE).delete()
    servers.ask(stale, "SETSLOT", slot_of(run_id), "NODE", servers.id_of(owner))


async def test_the_coordinator_has_a_slot_of_its_own(servers: ClusterServers) -> None:
    url = f"{servers.url}?wait_replicas=0"
    store = program.connect(url)
    await RedisTerm(url).check(store.term)
    record = RunRecord(run_id="mine", config_json="{}", folder="/mine")
    store.create_run(record)
    assert (store.active_run_id(), store.run("mine"), store.run_ids()) == ("mine", record, ["mine"])
    where = servers.owner(COORDINATOR)
    keys = {key for key in keys_on(where) if key.startswith(key_prefix(COORDINATOR))}
    assert {TERM_KEY, f"{key_prefix(COORDINATOR)}run:mine"} <= keys
    store.save_run(record.model_copy(update={"phase": Phase.STOPPED}))


def test_a_write_waits_for_the_replicas_of_its_own_node(servers: ClusterServers) -> None:
    board = make_board(servers.url, retry_seconds=PATIENCE)
    board.publish(term=1, groups=[group("a")])
    assert mark_key("run") in keys_on(servers.primary)
    alone = next(servers.tags_of(others(servers, servers.primary)[0]))
    with pytest.raises(
        BoardUnavailable, match=r"the cluster of .* has too few replicas .*: NOREPLICAS 0 of 1 replicas"
    ):
        make_board(servers.url, run_id=alone, timeout_seconds=0.4, retry_seconds=0.0)


class Busy:
    """A thread that publishes group after group, each until it is acknowledged; remembers what it waited for."""

    def __init__(self, board: Board) -> None:
        self.acknowledged: list[str] = []
        self.troubles: list[str] = []
        self._board = board
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        number = 0
        while not self._ended.is_set():
            try:
                self._board.set_gate(term=1, oldest_version=10_000, open=True)
                self._board.publish(term=1, groups=[group(f"b{number}")])
            except BoardUnavailable as error:
                self.troubles.append(str(error))
                continue
            self.acknowledged.append(f"b{number}")
            number += 1

    def await_more(self) -> None:
        """Wait until more is acknowledged."""
        before = len(self.acknowledged)
        wait_until(lambda: len(self.acknowledged) > before + 3, "acknowledged groups", 60.0)

    def await_trouble(self, text: str) -> None:
        """Wait until it waited because of this."""
        wait_until(
            lambda: any(text in one for one in self.troubles), text, 60.0, explain=lambda: str(self.troubles[-3:])
        )

    def end(self) -> None:
        """Stop, and check that all that was acknowledged is there, and nothing twice."""
        self._ended.set()
        self._thread.join(timeout=PATIENCE)
        assert not self._thread.is_alive()
        assert set(self.acknowledged) <= set(self._board.open_groups())
        audit(self._board)


def test_a_slot_that_moves_is_waited_for(servers: ClusterServers) -> None:
    source, target = others(servers, servers.primary)
    run_id = next(servers.tags_of(source))
    board = make_board(f"{servers.url}?wait_replicas=0", run_id=run_id, retry_seconds=0.2, steps=100_000)
    board.publish(term=1, groups=[group("a"), group("b")])
    advance(board, ["rollout"], tokens=LARGE)
    work = Busy(board)
    work.await_more()
    with servers.moving(run_id, target):
        work.await_trouble("is moving these keys to another node: ASK 127.0.0.1:")
        reader = Board(board._connection.url, run_id, STAGES, BoardConfig(), retry_seconds=0.2)
        for read in (reader.open_groups, reader.counts, reader.measure):  # what has moved is not taken for lost
            with pytest.raises(BoardUnavailable, match="is moving these keys to another node"):
                read()
    work.await_more()
    work.end()
    assert {"a", "b"} <= set(board.open_groups())
    assert [key for key in keys_on(target) if key.startswith(board.prefix)]
    assert not [key for key in keys_on(source) if key.startswith(board.prefix)]
    with servers.moving(run_id, source):
        pass
    board.delete()


@pytest.mark.night
async def test_a_board_in_the_event_loop_follows_its_slot(servers: ClusterServers) -> None:
    first, second = others(servers, servers.primary)
    run_id = next(servers.tags_of(first))
    slot = slot_of(run_id)
    blocking = make_board(f"{servers.url}?wait_replicas=0", run_id=run_id)
    board = AsyncBoard(blocking._connection.url, run_id, STAGES, BoardConfig(), retry_seconds=PATIENCE)
    await board.publish(term=1, groups=[group("a")])
    servers.ask(first, "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", servers.id_of(second))
    await asyncio.to_thread(wait_until, lambda: servers.owner(run_id) is second, "the move of the slot")
    await board.publish(term=1, groups=[group("b")])
    assert await board.open_groups() == ["a", "b"]
    assert await board.measure() > 0
    board._connection.retry_seconds = 0.2
    with servers.moving(run_id, first), pytest.raises(BoardUnavailable, match="is moving these keys to another node"):
        await board.counts()
    board._connection.retry_seconds = PATIENCE
    await board.delete()
    await board.close()


def test_a_slot_that_moves_in_one_go_is_followed(servers: ClusterServers) -> None:
    first, second = others(servers, servers.primary)
    run_id = next(servers.tags_of(first))
    slot = slot_of(run_id)
    board = make_board(f"{servers.url}?wait_replicas=0", run_id=run_id, retry_seconds=PATIENCE, steps=100_000)
    idle = Board(board._connection.url, run_id, STAGES, BoardConfig())
    work = Busy(board)
    for source, target in ((first, second), (second, first)):
        work.await_more()
        assert idle.measure() > 0  # its connection stays open, and its first command has no key
        servers.ask(source, "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", servers.id_of(target))
        wait_until(lambda there=target: servers.owner(run_id) is there, "the move of the slot")
        work.await_more()
    work.end()
    board.delete()


def test_the_coordinators_records_move_as_a_whole(servers: ClusterServers) -> None:
    store = Store(f"{servers.url}?wait_replicas=0")
    store.take_over()
    record = RunRecord(run_id="moving", config_json="{}", folder="/moving")
    store.create_run(record)
    source = servers.owner(COORDINATOR)
    target = others(servers, source)[0]
    with servers.moving(COORDINATOR, target), pytest.raises(StoreUnavailable, match="is moving these keys"):
        store.begin_delete("moving", "request")
    assert store.run("moving") == record, "half of a script was carried out"
    store.begin_delete("moving", "request")
    assert (store.run("moving"), store.deleting()) == (None, ["moving"])
    store.end_delete("moving")
    store.save_run(record.model_copy(update={"phase": Phase.STOPPED}))
    with servers.moving(COORDINATOR, source):
        pass


def test_a_replica_that_takes_over_is_followed(servers: ClusterServers) -> None:
    board = make_board(servers.url, retry_seconds=PATIENCE)
    blocked = threading.Thread(target=lambda: board.take("reward", "waits", count=1, block_seconds=2.0))
    blocked.start()
    servers.hand_over()
    board.publish(term=1, groups=[group("after")])
    blocked.join(timeout=PATIENCE)
    assert not blocked.is_alive()
    assert "after" in board.open_groups()
    audit(board)


@pytest.mark.slow
def test_what_was_acknowledged_survives_its_primary(servers: ClusterServers) -> None:
    board = make_board(servers.url, timeout_seconds=1.0, retry_seconds=0.5, steps=100_000)
    work = Busy(board)
    for _ in range(2):
        work.await_more()
        dead = servers.kill_primary()
        servers.await_promotion(dead)
        work.await_trouble("has too few replicas to take writes: NOREPLICAS 0 of 1 replicas")
        work.troubles.clear()
        servers.revive()
        work.await_more()
    work.end()


@pytest.mark.night
def test_failovers_in_a_cluster_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    found = campaign(tmp_path, 2, down_milliseconds=DOWN_MILLISECONDS, cluster=True)
    assert found.lost == []
    assert len(found.without_progress) == 2
    assert found.groups > 20


def test_a_primary_that_is_gone_is_named(servers: ClusterServers) -> None:
    owner = others(servers, servers.primary)[0]
    board = make_board(f"{servers.url}?wait_replicas=0", run_id=next(servers.tags_of(owner)), retry_seconds=0.2)
    owner.kill()
    message = f"(doesn't answer|doesn't serve these keys now).*127.0.0.1:{owner.port}"
    with pytest.raises(BoardUnavailable, match=message):
        board.counts()
    owner.start()
    servers.await_agreement()


def test_a_url_that_says_cluster_or_does_not_is_checked(servers: ClusterServers, redis_url: str) -> None:
    node = others(servers)[0]
    with pytest.raises(program.CannotStart, match=r"a node of a Redis Cluster.*: begin the URL with redis\+cluster://"):
        program.connect(node.url)
    elsewhere = next(servers.tags_of(others(servers, node)[0]))
    plain: Any = Board(node.url, elsewhere, (), BoardConfig())
    with pytest.raises(
        BoardError, match=r"is a node of a Redis Cluster, which a redis\+cluster:// URL must name: MOVED"
    ):
        plain.counts()
    port = redis_url.split(":")[2].split("/")[0]
    with pytest.raises(
        BoardUnavailable, match=rf"has no node for these keys: NOOWNER slot \d+ of 'run': 127.0.0.1:{port}: .*disabled"
    ):
        make_board(f"redis+cluster://127.0.0.1:{port}", retry_seconds=0.1)
