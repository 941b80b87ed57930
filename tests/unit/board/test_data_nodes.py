"""Large columns on data nodes: where they are, when they are freed, what is full, what is lost, what is refused."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import redis
from pydantic import ValidationError

from relaxd.board import Board, BoardUnavailable, NewGroup, RunExists, RunMissing, payload_transfer
from relaxd.board.scripts import run_script
from relaxd.config import BoardConfig
from tests.kit.boards import LARGE, advance, audit, group, make_board, make_overdue, output, take
from tests.kit.redis.redis_server import RedisServer

Make = Callable[..., RedisServer]
MB = 1 << 20


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory):
    servers = [RedisServer(tmp_path_factory.mktemp("node")).start() for _ in range(2)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def clients(nodes: list[RedisServer]):
    found = [redis.Redis.from_url(server.url, decode_responses=True) for server in nodes]
    for client in found:
        client.flushall()
        client.config_set("maxmemory", 0)
    yield found
    for client in found:
        client.close()


@pytest.fixture
def urls(nodes: list[RedisServer], clients: list[redis.Redis]) -> tuple[str, ...]:
    return tuple(server.url for server in nodes)


def columns_on(client: redis.Redis) -> list[str]:
    return sorted(client.keys("relaxd:*:columns:*"))


def test_large_columns_are_on_data_nodes_until_they_are_swept(redis_url, urls, clients):
    board = make_board(redis_url, data_urls=urls, groups_per_step=8)
    board.publish(term=1, groups=[group(f"g{number}") for number in range(8)])
    advance(board, ["rollout"], tokens=LARGE)
    audit(board)
    assert all(len(columns_on(client)) >= 3 for client in clients)  # 16 payloads, spread by a hash
    own = board._connection.client.keys(f"{board.prefix}columns:*")
    assert len(own) == 16  # the prompts, and the empty rests of the answers
    assert board.measure() > 8 * 12 * LARGE
    for loaded in board.load(take(board, "reward"), ["tokens", "prompt"]):
        np.testing.assert_array_equal(loaded["tokens"], output("rollout", tokens=LARGE)["tokens"])
    advance(board, ["critic"])
    board.drop_groups(["g0"], term=1, reason="by_hand")
    audit(board)
    board.sweep(term=1)
    audit(board)
    assert sum(len(columns_on(client)) for client in clients) == 14
    board.delete()
    assert [client.keys("*") for client in clients] == [[], []]
    assert board._connection.client.keys(f"{board.prefix}*") == []


def test_a_deleted_board_forgets_its_data_nodes_also_if_they_are_not_configured(redis_url, urls, clients):
    board = make_board(redis_url, data_urls=urls)
    board.publish(term=1, groups=[NewGroup("a", {"prompt_tokens": np.zeros(MB), "prompt": "?"})])
    assert sum(len(columns_on(client)) for client in clients) == 9  # 8 MiB and a header
    Board(redis_url, board.run_id, (), BoardConfig()).delete()
    assert [client.keys("*") for client in clients] == [[], []]
    with pytest.raises(RunMissing):
        board.counts()


def test_a_writer_that_stalls_until_it_was_given_up_leaks_nothing(redis_url, urls, monkeypatch):
    board = make_board(redis_url, data_urls=urls)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout")
    moments = []

    def stalling(name):
        function = getattr(payload_transfer, name)

        def stalled(*arguments):
            moments.append(name)
            if len(moments) < 5:
                make_overdue(board)
                board.sweep(term=1)
            return function(*arguments)

        monkeypatch.setattr(payload_transfer, name, stalled)

    stalling("write")  # the slices come after the sweep: they are registered again
    stalling("keep")  # they were swept before they last: they are written again
    assert board.commit([(delivery, output("rollout", tokens=LARGE))]) == [True]
    assert moments == ["write", "keep"] * 3
    audit(board)
    board.drop_groups(["a"], term=1, reason="by_hand")
    board.sweep(term=1)
    audit(board)


def test_prompts_of_which_one_was_given_up_are_all_written_again(redis_url, urls, monkeypatch):
    board = make_board(redis_url, data_urls=urls)
    large, write = {"prompt_tokens": np.arange(LARGE, dtype=np.int32), "prompt": "?"}, payload_transfer.write

    def stalled(attempts, milliseconds):
        monkeypatch.setattr(payload_transfer, "write", write)
        yield from write(attempts, milliseconds)
        board._connection.client.zadd(f"{board.prefix}pending", {attempts[1].pointer: 1})
        yield from run_script("sweep", board.prefix, 1, 100)  # only its first half: it is garbage, and not freed yet

    monkeypatch.setattr(payload_transfer, "write", stalled)
    board.publish(term=1, groups=[NewGroup(name, large) for name in "abc"])
    make_overdue(board)
    board.sweep(term=1)
    audit(board)
    loaded = board.load(take(board, "rollout"), ["prompt_tokens"])
    assert [len(found["prompt_tokens"]) for found in loaded] == [LARGE] * 3


def test_slices_that_expire_before_they_last_are_written_again(redis_url, urls, clients, monkeypatch):
    board = make_board(redis_url, data_urls=urls)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout")
    keep, times = payload_transfer.keep, []

    def expired(*arguments):
        times.append(1)
        if len(times) == 1:
            for client in clients:
                client.delete(*columns_on(client)[:1] or ["none"])
        return (yield from keep(*arguments))

    monkeypatch.setattr(payload_transfer, "keep", expired)
    assert board.commit([(delivery, output("rollout", tokens=LARGE))]) == [True]
    assert len(times) == 2
    make_overdue(board)
    board.sweep(term=1)
    audit(board)


def test_a_registration_that_arrives_late_costs_no_payload(redis_url, urls):
    board = make_board(redis_url, data_urls=urls)
    board.publish(term=1, groups=[NewGroup("a", {"prompt_tokens": np.zeros(MB), "prompt": "?"})])
    pointer = board._connection.client.hget(f"{board.prefix}group:a", "@publish")
    assert board._run(run_script("register", board.prefix, 1000, "a", "publish", pointer)) == []
    make_overdue(board)
    assert board.sweep(term=1) == 0
    audit(board)


def test_a_group_whose_payload_is_gone_from_its_node_is_tried_again(redis_url, urls, clients):
    board = make_board(redis_url, data_urls=urls, groups_per_step=8)
    board.publish(term=1, groups=[group(f"g{number}") for number in range(8)])
    advance(board, ["rollout"], tokens=LARGE)
    lost = {key.split(":")[3].split(".")[0] for key in columns_on(clients[0]) if ":tokens:" in key}
    clients[0].flushall()
    loaded = board.load(deliveries := take(board, "critic"), ["tokens"])
    assert {delivery.group_id for delivery, found in zip(deliveries, loaded, strict=True) if found is None} == lost
    assert 0 < len(lost) < 8
    assert {one.group_id: one.reason for one in board.dropped()} == dict.fromkeys(lost, "payload_lost")
    assert {retry.group_id for retry in board.retries()} == lost


def test_a_data_node_that_is_away_is_waited_for_by_name(redis_url, urls, redis_server: Make):
    server = redis_server(append_only=True)
    board = make_board(redis_url, data_urls=(server.url,), retry_seconds=0.1)
    board.publish(term=1, groups=[group("a")])
    advance(board, ["rollout"], tokens=LARGE)
    (delivery,) = take(board, "reward")
    server.kill()
    away = rf"Redis at 127.0.0.1:{server.port} doesn't answer"
    for operation in (
        lambda: board.load([delivery], ["tokens"]),
        lambda: board.admission(1000),
        lambda: board.publish(term=1, groups=[group("b")]),
        lambda: board.data_node_problems(),
    ):
        with pytest.raises(BoardUnavailable, match=away):
            operation()
    board.drop_groups(["a"], term=1, reason="by_hand")
    with pytest.raises(BoardUnavailable, match=away):
        board.sweep(term=1)
    server.start()
    board.sweep(term=1)
    board.publish(term=1, groups=[group("b")])
    audit(board)
    advance(board, ["rollout"], tokens=LARGE)
    server.kill()
    with pytest.raises(BoardUnavailable, match=away):
        board.delete()
    assert board._connection.client.keys(f"{board.prefix}*") == [f"{board.prefix}data_nodes".encode()]
    server.start()
    board.delete()
    with redis.Redis.from_url(server.url) as client:
        assert client.keys("relaxd:*:columns:*") == []
    assert board._connection.client.keys(f"{board.prefix}*") == []


def test_the_gate_knows_the_room_on_data_nodes(redis_url, urls, clients):
    board = make_board(redis_url, data_urls=urls, groups_per_step=1, max_staleness=99)
    for client, megabytes in zip(clients, (20, 40), strict=True):
        client.config_set("maxmemory", megabytes * MB)
    assert board.memory().max_bytes == 2 * 20 * MB  # both count like the one that is full first
    assert board.memory().high_water == 2 * 16 * MB
    assert (board.admission(8 * MB).room, board.admission(8 * MB).limit) == (4, "memory")
    clients[1].config_set("maxmemory", 1 * MB)  # less than it uses
    found = board.admission(1000)
    assert (found.room, found.limit) == (0, "full")
    assert found.detail.startswith("the fullest data node is full (all count like it): they use")
    clients[1].config_set("maxmemory", 0)
    board.publish(term=1, groups=[group("a"), group("b")])
    clients[1].config_set("maxmemory", 1 * MB)
    assert board.relieve(term=1) == 1
    clients[0].config_set("maxmemory-policy", "allkeys-lru")
    assert board.memory().policy == "allkeys-lru"
    clients[0].config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["redis://h:1/0", "redis://h:1/1"], "h:1 is named twice: each data node must be a server of its own"),
        (["postgres://h:1/0"], "postgres:// is no scheme of a Redis"),
        (["redis+cluster://h:1"], "the cluster of h:1 can't be a data node: name servers, each with a URL of its own"),
        (["redis://:secret@h:1/0"], "a URL has a password, which the run's records would show"),
    ],
)
def test_what_is_no_data_node_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        BoardConfig(data_urls=tuple(given))


def test_servers_that_can_be_no_data_nodes_are_named(redis_url, urls, tmp_path):
    board = make_board(redis_url, data_urls=(urls[0], urls[0].replace("127.0.0.1", "localhost"), redis_url))
    port = urls[0].split(":")[2].split("/")[0]
    own = redis_url.split("//")[1].split("/")[0]
    assert board.data_node_problems() == [
        f"localhost:{port} and 127.0.0.1:{port} are one server",
        f"{own} and {own} are one server",
    ]
    server = RedisServer(tmp_path, options=("--cluster-enabled", "yes")).start()
    clustered = make_board(redis_url, run_id="clustered", data_urls=(server.url,))
    assert "is a node of a Redis Cluster (cluster_enabled:1)" in clustered.data_node_problems()[0]
    server.stop()
    with pytest.raises(RunExists, match=r"with other data nodes \(board.data_urls\)"):
        make_board(redis_url, data_urls=urls)


def test_data_nodes_get_user_password_and_certificates_of_the_board() -> None:
    url = "rediss://ann:secret@redis:6379/0?ssl_ca_certs=/ca.crt&wait_replicas=1"
    board = Board(url, "run", (), BoardConfig(data_urls=("rediss://data:1/0", "redis://bob@other:1/0")))
    assert [connection.url for connection in board._nodes.data] == [
        "rediss://ann:secret@data:1/0?ssl_ca_certs=/ca.crt",
        "redis://bob@other:1/0",
    ]
