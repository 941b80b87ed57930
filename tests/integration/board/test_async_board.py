"""The board's face for an event loop: the same operations, when Redis is there, away, or forgets its scripts."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import redis

from relaxd.board import AsyncBoard, Board, BoardUnavailable, Fenced, NewGroup
from relaxd.board.connection import AT_ONCE
from relaxd.config import BoardConfig
from relaxd.redis_client.operations import Operation
from tests.kit.boards import LARGE, STAGES, advance, audit, group, make_board, output, take
from tests.kit.disks import no_descriptors
from tests.kit.redis.redis_server import RedisServer

Make = Callable[..., RedisServer]


@pytest.fixture
async def board(redis_url: str) -> AsyncIterator[AsyncBoard]:
    board = AsyncBoard(redis_url, "run", STAGES, BoardConfig(), retry_seconds=5.0)
    await board.create(term=1, groups_per_step=2, steps=9)
    await board.set_gate(term=1, oldest_version=0, open=True)
    yield board
    await board.close()


@pytest.fixture
def blocking(redis_url: str, board: AsyncBoard) -> Board:
    return Board(redis_url, "run", STAGES, BoardConfig())


def test_both_faces_have_every_operation() -> None:
    found = {name for base in AsyncBoard.__mro__ for name, value in vars(base).items() if isinstance(value, Operation)}
    assert {"publish", "take", "load", "commit", "commit_step", "sweep", "counts", "delete"} <= found
    assert all(isinstance(vars(Board).get(name, Operation), type) for name in found)  # neither face has its own
    assert all(isinstance(vars(AsyncBoard).get(name, Operation), type) for name in found)
    assert AsyncBoard.counts.__doc__ == Board.counts.__doc__
    assert "conservation law" in (Board.counts.__doc__ or "")


async def test_groups_pass_through_stages(board: AsyncBoard, blocking: Board) -> None:
    await board.publish(term=1, groups=[group("a"), group("b")], cursor=7)
    assert await board.cursor() == 7
    for name in ("rollout", "reward", "critic", "advantage"):
        held = await board.take(name, "worker", count=9, block_seconds=1)
        assert {one.group_id for one in held} == {"a", "b"}
        assert (await board.queues())[[stage.name for stage in STAGES].index(name)].held == 2
        assert (await board.oldest_held())[name].group_id == "a"
        assert await board.commit([(one, output(name, tokens=LARGE)) for one in held]) == [True, True]
        audit(blocking)
    held = await board.take("train", "trainer", count=9, block_seconds=1)
    found = await board.load(held, ["prompt", "tokens", "advantages"])
    assert [len(columns["tokens"]) for columns in found if columns is not None] == [LARGE, LARGE]
    term = await board.new_trainer_term()
    samples = [{"group_id": "a", "response": "text"}]
    await board.commit_step(term=term, step=1, plan={"groups": ["a", "b"]}, metrics={"loss": 1.0}, samples=samples)
    assert await board.sweep(term=1) == 10
    assert await board.ledger() == blocking.ledger()
    assert await board.sample_page(1) == blocking.sample_page(1)
    assert (await board.counts()).trained == 2
    assert [fate.line["group"] for fate in await board.fates()] == ["a", "b"]
    assert await board.measure() == blocking.measure() > 0
    audit(blocking)
    await board.delete()
    assert not blocking._connection.client.keys(f"{board.prefix}*")


async def test_errors_are_the_same(board: AsyncBoard) -> None:
    with pytest.raises(Fenced, match="term 0 is over"):
        await board.publish(term=0, groups=[group("a")])
    with pytest.raises(ValueError, match="group_id 'a b'"):
        await board.publish(term=1, groups=[group("a b")])


async def test_scripts_that_redis_forgot_are_loaded_again(board: AsyncBoard, blocking: Board) -> None:
    blocking._connection.client.script_flush()
    await board.publish(term=1, groups=[group("a")])
    assert await board.open_groups() == ["a"]


async def test_a_call_that_is_cancelled_leaves_no_reply_to_another(board: AsyncBoard, blocking: Board) -> None:
    for number in range(4):
        waiting = asyncio.create_task(board.take("reward", "worker", count=1, block_seconds=30))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await board.publish(term=1, groups=[group(f"g{number}")])
        assert await board.open_groups() == [f"g{index}" for index in range(number + 1)]
    advance(blocking, ["rollout"])
    audit(blocking)


async def test_a_loop_of_calls_can_be_cancelled_at_any_moment(board: AsyncBoard) -> None:
    async def ask_for_ever() -> None:
        while True:
            await board.counts()

    for turns in range(200):
        asking = asyncio.create_task(ask_for_ever())
        for _ in range(turns % 60):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking], timeout=1.0)
        assert asking.done(), f"it went on after it was cancelled at turn {turns % 60}"


async def test_many_calls_share_a_bounded_number_of_connections(board: AsyncBoard, redis_url: str) -> None:
    await board.publish(term=1, groups=[group("a")])
    with redis.Redis.from_url(redis_url) as client:
        before = {one["id"] for one in client.client_list()}  # tests before may not have closed theirs yet
        found = await asyncio.gather(*(board.counts() for _ in range(4 * AT_ONCE)))
        opened = [one for one in client.client_list() if one["id"] not in before]
    assert {counts.open for counts in found} == {1}
    assert 1 < len(opened) <= AT_ONCE


async def test_calls_share_the_connections_there_are_when_no_more_can_be_opened(board: AsyncBoard) -> None:
    with no_descriptors(pid=os.getpid()):
        counts = await asyncio.gather(*(board.counts() for _ in range(8)))
    assert [one.published for one in counts] == [0] * 8


async def test_an_outage_is_waited_for_as_long_as_the_board_says(redis_server: Make) -> None:
    server = redis_server(append_only=True)
    make_board(server.url)
    board = AsyncBoard(server.url, "run", STAGES, BoardConfig(), timeout_seconds=1.0, retry_seconds=10.0)
    await board.publish(term=1, groups=[group("a")])
    server.kill()
    publishing = asyncio.create_task(board.publish(term=1, groups=[group("b")]))
    await asyncio.sleep(0.3)
    assert not publishing.done()
    await asyncio.to_thread(server.start)
    assert await publishing == ["b"]
    assert await board.open_groups() == ["a", "b"]
    server.kill()
    board._connection.retry_seconds = 0.2
    begun = time.monotonic()
    with pytest.raises(BoardUnavailable, match=f"127.0.0.1:{server.port}"):
        await board.counts()
    assert time.monotonic() - begun < 4
    await board.close()


async def test_large_columns_are_on_data_nodes(redis_url: str, redis_server: Make) -> None:
    node = redis_server()
    blocking = make_board(redis_url, data_urls=(node.url,))
    board = AsyncBoard(redis_url, "run", STAGES, blocking.limits)
    await board.publish(term=1, groups=[NewGroup("a", {"prompt_tokens": np.zeros(LARGE), "prompt": "?"})])
    assert (await board.memory()).max_bytes > 0
    (delivery,) = take(blocking, "rollout")
    assert await board.commit([(delivery, output("rollout", tokens=LARGE))]) == [True]
    (columns,) = await board.load([delivery], ["tokens", "prompt_tokens"])
    assert columns is not None
    assert len(columns["tokens"]) == LARGE
    audit(blocking)
    with redis.Redis.from_url(node.url) as client:
        assert len(client.keys("*")) == 3
        again = AsyncBoard(redis_url, "run", (), BoardConfig())  # whoever deletes a run knows only its id
        await again.delete()
        assert not client.keys("*")
    await again.close()
    await board.close()
