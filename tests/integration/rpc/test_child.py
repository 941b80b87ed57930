"""A parent and real child processes."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest

from relaxd.process.child import Child, ChildExited, ChildRequestError, ChildTimeout
from tests.kit.processes import is_alive, start_python
from tests.kit.waiting import wait_until

MODULE = "tests.integration.rpc.echo_child"
PARENT = f"""
import asyncio, time
from relaxd.process.child import Child
async def main():
    child = await Child.start("{MODULE}")
    await child.request("echo", {{}}, 30)
    print(child.pid, flush=True)
    await child.request("freeze", {{}}, 3600)
asyncio.run(main())
"""


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    child = await Child.start(MODULE, name="echo")
    yield child
    child.kill()
    await child.exited


async def test_answers_carry_values_of_any_size(child: Child) -> None:
    params = {"tokens": list(range(200_000)), "text": "żółw\n", "logprob": -0.25, "none": None}
    assert await child.request("echo", params, 30) == params


async def test_a_request_that_waits_holds_up_no_other(child: Child) -> None:
    waiting = asyncio.create_task(child.request("hang", {}, 30))
    assert await child.request("echo", {"a": 1}, 30) == {"a": 1}
    await child.request("release", {}, 30)
    assert await waiting == "released"


async def test_a_deadline_is_kept_and_a_late_answer_harms_nobody(child: Child) -> None:
    await child.request("echo", {}, 30)
    with pytest.raises(ChildTimeout, match=r"echo did not answer hang within 0\.1 s"):
        await child.request("hang", {}, 0.1)
    await child.request("release", {}, 30)
    assert await child.request("echo", {"still": "there"}, 30) == {"still": "there"}


async def test_errors_carry_kind_message_and_details(child: Child) -> None:
    with pytest.raises(ChildRequestError, match="no") as refused:
        await child.request("refuse", {}, 30)
    assert (refused.value.kind, refused.value.details) == ("HandlerError", {"field": "x"})
    with pytest.raises(ChildRequestError, match="bad value 7") as failed:
        await child.request("fail", {}, 30)
    assert failed.value.kind == "ValueError"
    with pytest.raises(ChildRequestError, match="no method 'fly'; there are"):
        await child.request("fly", {}, 30)


async def test_an_answer_that_is_too_large_is_an_error_and_the_child_goes_on(child: Child) -> None:
    await child.request("limit", {"bytes": 1000})
    with pytest.raises(
        ChildRequestError, match=r"the answer to repeat is a message of 20.. bytes; at most 1000"
    ) as caught:
        await child.request("repeat", {"text": "x", "times": 2000}, timeout=5)
    assert caught.value.kind == "FrameError"
    assert await child.request("echo", {"text": "y"}, timeout=5) == {"text": "y"}


async def test_events_come_in_order_and_before_the_answer_that_follows_them() -> None:
    seen: list[Any] = []
    child = await Child.start(MODULE, on_event=lambda event, params: seen.append((event, params["number"])))
    assert await child.request("count", {"to": 100}, 30) == 100
    assert seen == [("number", number) for number in range(100)]
    await child.stop()


async def test_death_is_noticed_at_once_with_code_and_last_lines(child: Child) -> None:
    waiting = asyncio.create_task(child.request("hang", {}, 30))
    await child.request("echo", {}, 30)
    dying = asyncio.create_task(child.request("die", {"code": 3}, 30))
    with pytest.raises(ChildExited, match="echo exited with code 3; its last lines:\nlast words"):
        await asyncio.wait_for(dying, 5)
    with pytest.raises(ChildExited):
        await waiting
    assert not child.alive
    with pytest.raises(ChildExited):
        await child.request("echo", {}, 30)


async def test_a_killed_child_names_the_signal(child: Child) -> None:
    await child.request("echo", {}, 30)
    os.kill(child.pid, signal.SIGKILL)
    ended = await asyncio.wait_for(asyncio.shield(child.exited), 5)
    assert ended.exit_code == -signal.SIGKILL
    with pytest.raises(ChildExited, match="echo was killed by signal 9"):
        await child.request("echo", {}, 30)


async def test_a_child_that_cannot_start_says_why() -> None:
    child = await Child.start("tests.integration.rpc.no_such_module")
    with pytest.raises(ChildExited, match="No module named"):
        await child.request("echo", {}, 30)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_dies_with_its_parent(how: signal.Signals) -> None:
    with start_python("-c", PARENT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, how)
    wait_until(lambda: not is_alive(pid), "the child is dead", 5)
