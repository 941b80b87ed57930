"""A parent and real child processes."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from relaxd.process.child import LIFELINE_VARIABLE, SOCKET_VARIABLE, TOKEN_VARIABLE, Child, ChildExited
from relaxd.process.child_channel import RequestStream
from relaxd.process.child_server import serve_socket
from relaxd.process.upkeep import IDLE_THREADS
from relaxd.rpc.errors import DeadlineExceeded, InvalidArgument, RpcError
from tests.integration.rpc.echo_child import Echo, add_echo
from tests.kit.child_service import ChildStub, struct
from tests.kit.processes import COLD, is_alive, run_python, start_python
from tests.kit.waiting import eventually, wait_until

MODULE = "tests.integration.rpc.echo_child"
PARENT = f"""
import asyncio, time
from relaxd.process.child import Child
from tests.kit.child_service import ChildStub, struct
async def main():
    child = await Child.start("{MODULE}")
    echo = ChildStub(child.channel)
    await echo.echo(struct(), timeout=30)
    print(child.pid, flush=True)
    await echo.freeze(struct(), timeout=None)
asyncio.run(main())
"""


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    child = await Child.start(MODULE, name="echo")
    yield child
    child.kill()
    await child.exited


@pytest.fixture
def echo(child: Child) -> ChildStub:
    return ChildStub(child.channel)


async def test_answers_carry_values_of_any_size(echo: ChildStub) -> None:
    request = struct(tokens=list(range(200_000)), text="żółw\n", logprob=-0.25, none=None)
    assert await echo.echo(request, timeout=30) == request
    long = await echo.repeat(struct(text="x", times=80 << 20), timeout=60)  # above the limits between services
    assert len(long["text"]) == 80 << 20


async def test_a_request_that_waits_holds_up_no_other(echo: ChildStub) -> None:
    waiting = [asyncio.create_task(echo.hang(Struct(), timeout=30)) for _ in range(100)]
    assert await echo.echo(struct(a=1), timeout=30) == struct(a=1)
    await echo.release(Struct(), timeout=30)
    assert await asyncio.gather(*waiting) == [struct(answer="released")] * 100


async def test_requests_of_a_stream_are_answered_in_turn(echo: ChildStub) -> None:
    turns = RequestStream(echo.stream_stream("each"), "each")
    answers = await asyncio.gather(*(turns.ask(struct(do="echo", number=n), timeout=30) for n in range(20)))
    assert [answer["number"] for answer in answers] == list(range(20))
    assert len({answer["stream"] for answer in answers}) == 1
    again = await turns.ask(struct(do="thread"), timeout=30)
    assert (again["name"], again["stream"]) == ("each", answers[0]["stream"])


async def test_a_stream_of_requests_ends_with_one_that_fails_and_the_next_opens_another(echo: ChildStub) -> None:
    turns = RequestStream(echo.stream_stream("each"), "each of echo")
    with pytest.raises(RpcError, match="no") as refused:
        await turns.ask(struct(do="refuse"), timeout=30)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(RpcError, match="bad value 7"):
        await turns.ask(struct(do="fail"), timeout=30)
    assert await turns.ask(struct(), timeout=30)
    late = asyncio.create_task(turns.ask(struct(do="hang"), timeout=0.3))
    waits = asyncio.create_task(turns.ask(struct(do="echo", number=7), timeout=30))
    with pytest.raises(DeadlineExceeded, match=r"each of echo was not answered within 0.3 s"):
        await late
    assert (await waits)["number"] == 7
    left = asyncio.create_task(turns.ask(struct(do="hang"), timeout=None))
    await asyncio.wait({left}, timeout=0.1)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert await turns.ask(struct(), timeout=30)
    with pytest.raises(ChildExited, match="last words"):
        await turns.ask(struct(do="die", code=3), timeout=30)
    with pytest.raises(ChildExited, match="last words"):
        await turns.ask(struct(), timeout=30)


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_follows_an_answer_is_done_after_it_and_also_if_the_caller_has_left(
    echo: ChildStub, leaves: bool
) -> None:
    turns = RequestStream(echo.stream_stream("answer_first"), "answer_first")
    if leaves:
        left = asyncio.create_task(turns.ask(struct(hang=True), timeout=30))
        await echo.wait_asked(Struct(), timeout=30)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
    else:
        await turns.ask(Struct(), timeout=30)
    followed = asyncio.create_task(echo.wait_followed(Struct(), timeout=30))
    await echo.release(Struct(), timeout=30)
    await followed


async def test_a_stream_that_fails_leaves_nothing_behind(echo: ChildStub) -> None:
    turns = RequestStream(echo.stream_stream("each"), "each")
    before = len(asyncio.all_tasks())
    for _ in range(5):
        with pytest.raises(RpcError, match="no"):
            await turns.ask(struct(do="refuse"), timeout=30)

    async def gone() -> bool:
        return len(asyncio.all_tasks()) <= before

    await eventually(gone, "gRPC's tasks have ended")


async def test_calls_one_after_the_other_share_a_thread_and_the_threads_of_many_at_once_end(echo: ChildStub) -> None:
    threads = [await echo.thread(Struct(), timeout=30) for _ in range(20)]
    assert {thread["id"] for thread in threads} == {threads[0]["id"]}
    await echo.echo(Struct(), timeout=30)
    assert (await echo.thread(Struct(), timeout=30))["name"] == "thread"  # each thread has its call's name

    async def count() -> float:
        return float((await echo.thread(Struct(), timeout=30))["threads"])

    async def many() -> bool:
        return await count() > 100

    async def few() -> bool:
        return await count() <= threads[0]["threads"] + IDLE_THREADS

    waiting = [asyncio.create_task(echo.hang(Struct(), timeout=30)) for _ in range(100)]
    await eventually(many, "all calls have threads")
    await echo.release(Struct(), timeout=30)
    await asyncio.gather(*waiting)
    await eventually(few, "most threads have ended")


async def test_a_deadline_is_kept_and_a_late_answer_harms_nobody(echo: ChildStub) -> None:
    await echo.echo(Struct(), timeout=30)
    with pytest.raises(DeadlineExceeded, match=r"echo did not answer hang within 0\.1 s"):
        await echo.hang(Struct(), timeout=0.1)
    await echo.release(Struct(), timeout=30)
    assert await echo.echo(struct(still="there"), timeout=30) == struct(still="there")


async def test_handlers_know_their_deadline_and_calls_without_one_have_none(echo: ChildStub) -> None:
    assert 0 < (await echo.seconds_left(Struct(), timeout=30))["seconds"] <= 30
    assert (await echo.seconds_left(Struct(), timeout=None))["seconds"] is None
    with pytest.raises(TypeError, match="timeout"):
        await echo.seconds_left(Struct())


async def test_errors_carry_code_message_and_details(echo: ChildStub) -> None:
    with pytest.raises(InvalidArgument, match="no") as refused:
        await echo.refuse(Struct(), timeout=30)
    assert refused.value.reason == "INVALID_ARGUMENT"
    assert b"is wrong" in dict(refused.value.trailing_metadata())["grpc-status-details-bin"]
    with pytest.raises(RpcError, match="ValueError: bad value 7") as failed:
        await echo.fail(Struct(), timeout=30)
    assert failed.value.code is grpc.StatusCode.INTERNAL
    with pytest.raises(RpcError, match="UNIMPLEMENTED: Method not found"):
        await echo.fly(Struct(), timeout=30)


async def test_a_stream_comes_in_order_and_can_be_left(echo: ChildStub) -> None:
    seen = [answer["number"] async for answer in echo.stream("count")(struct(to=100), timeout=30)]
    assert seen == list(range(100))
    stream = echo.stream("count")(struct(to=100), timeout=30)
    assert (await anext(stream))["number"] == 0
    await stream.aclose()
    assert await echo.echo(Struct(), timeout=30) == Struct()


@pytest.mark.parametrize("ends", ["killed", "running"])
@pytest.mark.parametrize("left", ["answered", "unanswered", "unread", "being read"])
def test_a_parent_ends_without_a_word_whatever_streams_it_has_left(left: str, ends: str) -> None:
    parent = run_python("-m", "tests.integration.rpc.leaving_parent", left, ends)
    assert (parent.returncode, parent.stdout, parent.stderr) == (0, "", "")


async def test_only_the_parent_is_answered() -> None:
    child = await Child.start(MODULE, env=COLD)
    echo = ChildStub(child.channel)
    variables = dict(
        line.split("=", 1) for line in Path(f"/proc/{child.pid}/environ").read_text().split("\0") if "=" in line
    )
    folder = Path(variables[SOCKET_VARIABLE]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert variables[TOKEN_VARIABLE]
    assert variables[LIFELINE_VARIABLE]
    await echo.echo(Struct(), timeout=30)
    assert not folder.exists()  # nobody else can connect any more
    child.kill()
    await child.exited


async def test_a_call_without_the_token_of_this_launch_is_refused(tmp_path: Path) -> None:
    listening = asyncio.Event()
    serving = asyncio.create_task(serve_socket(str(tmp_path / "socket"), "right", ((add_echo, Echo()),), listening.set))
    await listening.wait()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'socket'}") as channel:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ChildStub(channel).echo(Struct(), timeout=30, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = await ChildStub(channel).echo(struct(a=1), timeout=30, metadata=(("authorization", "Bearer right"),))
        assert answer == struct(a=1)
    serving.cancel()


async def test_death_is_noticed_at_once_with_code_and_last_lines(child: Child, echo: ChildStub) -> None:
    waiting = asyncio.create_task(echo.hang(Struct(), timeout=30))
    await echo.echo(Struct(), timeout=30)
    dying = asyncio.create_task(echo.die(struct(code=3), timeout=30))
    with pytest.raises(ChildExited, match="echo exited with code 3; its last lines:\nlast words"):
        await asyncio.wait_for(dying, 30)
    with pytest.raises(ChildExited):
        await waiting
    assert not child.alive
    with pytest.raises(ChildExited):
        await echo.echo(Struct(), timeout=30)


async def test_a_killed_child_names_the_signal(child: Child, echo: ChildStub) -> None:
    await echo.echo(Struct(), timeout=30)
    os.kill(child.pid, signal.SIGKILL)
    ended = await asyncio.wait_for(asyncio.shield(child.exited), 30)
    assert ended.exit_code == -signal.SIGKILL
    with pytest.raises(ChildExited, match="echo was killed by signal 9"):
        await echo.echo(Struct(), timeout=30)


async def test_a_child_that_cannot_start_says_why() -> None:
    child = await Child.start("tests.integration.rpc.no_such_module")
    with pytest.raises(ChildExited, match="No module named"):
        await ChildStub(child.channel).echo(Struct(), timeout=30)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_dies_with_its_parent(how: signal.Signals) -> None:
    with start_python("-c", PARENT, environment=COLD, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, how)
    wait_until(lambda: not is_alive(pid), "the child is dead")
