"""A link that breaks at one command: what Redis has done then, and what its client is told."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from relaxd.board import Board
from relaxd.board.command_packing import CommandPacker, Payload
from relaxd.config import BoardConfig
from tests.chaos.commands import CommandStream
from tests.chaos.proxy import Link, Loop
from tests.kit.boards import STAGES, group, output, take
from tests.kit.ports import free_port


@pytest.fixture
def link(redis_url: str) -> Iterator[tuple[Link, Loop]]:
    with Loop() as loop:
        one = Link("client > redis", free_port(), int(redis_url.rpartition(":")[2].partition("/")[0]), to_redis=True)
        loop.do(one.start())
        yield one, loop


def client_of(link: Link) -> redis.Redis:
    return redis.Redis(port=link.port, retry=Retry(NoBackoff(), 0), socket_timeout=20.0)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_commands_are_found_however_the_stream_is_cut(size: int) -> None:
    packer = CommandPacker()
    chunks = packer.pack("SET", "a", Payload([b"*1\r\n$4\r\nQUIT\r\n" * 9], 126))
    chunks += packer.pack("PING") + packer.pack("UNLINK", "b", "c")
    data = b"".join(bytes(chunk) for chunk in chunks)
    stream = CommandStream()
    found = [command for start in range(0, len(data), size) for command in stream.feed(data[start : start + size])]
    assert [command.name for command in found] == ["SET a", "PING", "UNLINK b"]
    assert b"".join(command.data for command in found) == data


@pytest.mark.parametrize(("moment", "done"), [("before", [b"1", None, None]), ("after", [b"1", b"2", None])])
def test_it_breaks_before_or_after_a_command_of_a_pipeline(
    link: tuple[Link, Loop], redis_url: str, moment: str, done: list[bytes | None]
) -> None:
    one, loop = link
    seen: list[list[bytes | None]] = []
    direct, struck = redis.Redis.from_url(redis_url), threading.Event()

    def strike() -> None:
        seen.append(direct.mget("a", "b", "c"))
        struck.set()

    loop.do(one.arm("SET b", moment, strike))
    with client_of(one) as client:
        pipe = client.pipeline(transaction=False).set("a", 1).set("b", 2).set("c", 3)
        with pytest.raises(redis.ConnectionError):
            pipe.execute()
        assert struck.wait(10)
        assert seen == [done]
        assert pipe.set("b", 4).execute() == [True]  # it was armed for one command
    assert direct.mget("a", "b", "c") == [b"1", b"4", None]


def test_nothing_breaks_once_it_is_disarmed_or_at_other_commands(link: tuple[Link, Loop]) -> None:
    one, loop = link
    loop.do(one.arm("SET b", "before"))
    with client_of(one) as client:
        assert client.set("a", 1)
        loop.do(one.disarm())
        assert client.set("b", 1)


def test_a_link_that_carries_no_commands_says_so() -> None:
    with Loop() as loop, pytest.raises(ValueError, match="a > b carries no commands to Redis"):
        loop.do(Link("a > b", 1, 2).arm("commit", "before"))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["register", "SET *:columns:*", "commit"])
def test_a_commit_takes_effect_once_wherever_its_connection_breaks(
    link: tuple[Link, Loop], step: str, moment: str
) -> None:
    one, loop = link
    board = Board(f"redis://127.0.0.1:{one.port}/0", "run", STAGES, BoardConfig(large_column_bytes=1))
    board.create(term=1, groups_per_step=1, steps=1)
    board.set_gate(term=1, oldest_version=0, open=True)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout", "one")
    struck = threading.Event()
    loop.do(one.arm(step, moment, struck.set))
    columns = output("rollout")
    assert board.commit([(delivery, columns)]) == [True]
    assert struck.is_set()
    (reward,) = take(board, "reward", "one")
    (loaded,) = board.load([reward], ["tokens"])
    np.testing.assert_array_equal(loaded["tokens"], columns["tokens"])
    board.close()
