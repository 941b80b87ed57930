"""Processes that are killed between any two of their commands to Redis, while they write or free large columns."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import pytest

from relaxd.board import Board, Delivery, NewGroup, Stage, payload_transfer
from relaxd.board.connection import RedisConnection
from relaxd.config import BoardConfig
from tests.kit.boards import LARGE, advance, audit, end_leases, group, make_board, make_overdue, output, take

SECONDS = 120.0


class DyingConnection(RedisConnection):
    """Kills its process before its `left`th operation."""

    left = 0

    def run(self, operation: Any) -> Any:
        DyingConnection.left -= 1
        if DyingConnection.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(operation)


Work: TypeAlias = Callable[[Board], object]

# This process has threads, and a fork of it might wait for ever for a lock that one of them held. The server, which
# makes processes here, has none.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])


def deaths(board: Board, work: Work) -> Iterator[int]:
    """Do work in a process of its own, which is killed before its first operation, then before its second, and so on.

    Yields after each death, and ends once the work was done before it could be killed.
    """
    for step in range(1, 100):
        place = (board._connection.url, board.run_id, board.stages, board.limits)
        process = SERVER.Process(target=die_at, args=(step, work, *place))
        process.start()
        process.join(SECONDS)
        if process.exitcode == 0:
            return
        assert process.exitcode == -signal.SIGKILL
        yield step
    raise AssertionError("it never ended")


def die_at(step: int, work: Work, url: str, run_id: str, stages: tuple[Stage, ...], limits: BoardConfig) -> None:
    """Do work on a board. Kill this process before its `step`th operation."""
    # Write and free one slice after the other.
    payload_transfer.BYTES_TOGETHER = payload_transfer.KEYS_TOGETHER = 1
    mine = Board(url, run_id, stages, limits)
    # All of them together die at the same command.
    DyingConnection.left = step
    for connection in mine._nodes.every:
        connection.__class__ = DyingConnection
    work(mine)


def everything_ends(board: Board) -> None:
    """Check that nothing is left but what expires, once all groups are closed and what is overdue is given up."""
    client, prefix = board._connection.client, board.prefix
    for group_id in board.open_groups():
        board.drop_groups([group_id], term=1, reason="the end")
    make_overdue(board)
    board.sweep(term=1)
    audit(board)
    assert not client.exists(f"{prefix}pending", f"{prefix}garbage")
    for server in (connection.client for connection in board._nodes.every):
        assert all(server.ttl(key) > 0 for key in server.keys(f"{prefix}columns:*"))


def take_and_commit(mine: Board) -> None:
    """Do a stage's work."""
    (delivery,) = take(mine, "rollout", "dying")
    assert mine.commit([(delivery, output("rollout", tokens=LARGE))]) == [True]


def save_twice_and_commit(mine: Board, delivery: Delivery) -> None:
    """Save two parts of unfinished answers, and commit."""
    part = output("rollout", tokens=LARGE)
    pointers = mine.save(delivery, part, after="")
    assert mine.save(delivery, part, after=str(pointers))
    assert mine.commit([(delivery, part)]) == [True]


def commit_a_step(mine: Board) -> None:
    """Commit the first step with its samples, as the trainer."""
    shown = [{"response": "x" * LARGE * 4, "number": number} for number in range(2)]
    mine.commit_step(term=1, step=1, plan={"groups": ["a"]}, metrics={}, samples=shown)


def publish_two(mine: Board) -> None:
    """Publish two groups, as the coordinator."""
    columns = {"prompt_tokens": output("rollout", tokens=LARGE)["tokens"], "prompt": "x" * LARGE * 4}
    mine.publish(term=1, groups=[NewGroup("a", columns), NewGroup("b", columns)], cursor=2)


def sweep(mine: Board) -> None:
    """Sweep, as the coordinator."""
    mine.sweep(term=1)


@pytest.fixture(params=[0, 2], ids=["no data nodes", "two data nodes"])
def data_urls(redis_url: str, request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Data nodes: further databases of the server do, under two names."""
    first = redis_url.removesuffix("0") + "1"
    second = redis_url.removesuffix("0").replace("127.0.0.1", "localhost") + "2"
    return (first, second)[: request.param]


def test_a_stage_that_dies_anywhere_in_its_commit(redis_url: str, data_urls: tuple[str, ...]) -> None:
    board = make_board(redis_url, max_deliveries=100, data_urls=data_urls)
    board.publish(term=1, groups=[NewGroup("a", {"prompt_tokens": output("rollout")["tokens"], "prompt": "?"})])

    steps = 0
    for _ in deaths(board, take_and_commit):
        steps += 1
        audit(board)
        end_leases(board, "rollout")
    assert steps >= 6  # the two of take, registering, two slices, the script
    audit(board)
    (delivery,) = take(board, "critic")
    assert board.load([delivery], ["tokens"])[0]["tokens"].size == LARGE  # type: ignore[index, union-attr]
    everything_ends(board)


def test_a_replica_that_dies_anywhere_while_it_saves_unfinished_answers(redis_url: str) -> None:
    board = make_board(redis_url, max_deliveries=100)
    board.publish(term=1, groups=[NewGroup("a", {"prompt_tokens": output("rollout")["tokens"], "prompt": "?"})])
    (delivery,) = take(board, "rollout", "replica")
    found = []
    for _ in deaths(board, partial(save_twice_and_commit, delivery=delivery)):
        audit(board)
        found.append(len(board.saved(delivery).parts))
        assert board.forget_saved(delivery, board.saved(delivery).pointers)
        audit(board)
    assert found == sorted(found)
    assert set(found) == {0, 1, 2}
    audit(board)
    assert board.saved(delivery).parts == ()
    everything_ends(board)


def test_a_trainer_that_dies_anywhere_in_the_commit_of_a_step(redis_url: str) -> None:
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    assert board.new_trainer_term() == 1
    steps = 0
    for _ in deaths(board, commit_a_step):
        steps += 1
        audit(board)
        assert (board.last_step(), board.sample_page(), board.open_groups()) == (0, [], ["a"])
    assert steps >= 3  # registering, two samples
    commit_a_step(board)  # its reply was lost: repeated, and written under another name
    audit(board)
    assert [(key, one["number"]) for key, one in board.sample_page()] == [("1-1", 1), ("1-0", 0)]
    board.sweep(term=1)
    make_overdue(board)
    board.sweep(term=1)
    audit(board)
    client, prefix = board._connection.client, board.prefix
    assert not client.exists(f"{prefix}pending", f"{prefix}garbage")
    lasting = [key for key in client.keys(f"{prefix}columns:*") if client.ttl(key) == -1]
    assert len(lasting) == 3  # the two samples, and what says that they were accepted


def test_a_coordinator_that_dies_anywhere_in_publishing(redis_url: str) -> None:
    board = make_board(redis_url)
    for _ in deaths(board, publish_two):
        audit(board)
        assert board.open_groups() == []
        assert board.cursor() is None
    assert board.open_groups() == ["a", "b"]
    audit(board)
    assert all(found is not None for found in board.load(take(board, "rollout"), ["prompt", "prompt_tokens"]))
    everything_ends(board)


def test_a_coordinator_that_dies_anywhere_in_a_sweep(redis_url: str, data_urls: tuple[str, ...]) -> None:
    board = make_board(redis_url, groups_per_step=8, data_urls=data_urls)
    names = ["a", "b", "c"]
    columns = {"prompt_tokens": output("rollout")["tokens"], "prompt": "?"}
    board.publish(term=1, groups=[NewGroup(name, columns) for name in names])
    advance(board, ["rollout"], tokens=LARGE)
    board.drop_groups(["a"], term=1, reason="by hand")
    board.drop_groups(["b"], term=1, reason="by hand", retry=True)
    steps = 0
    for _ in deaths(board, sweep):
        steps += 1
        audit(board)
        kept = {
            delivery.group_id: found
            for delivery in take(board, "reward")
            for found in board.load([delivery], ["tokens"])
        }
        assert all(found is not None for found in kept.values())
        end_leases(board, "reward")
    assert steps >= 8  # a's prompt and columns, b's columns: seven keys, and the script
    board.publish(term=1, groups=[NewGroup("b~1", retry_of="b")])
    assert board.load(take(board, "rollout"), ["prompt"]) == [{"prompt": "?"}]
    everything_ends(board)
