"""The end of a lease on GPUs, with real processes in the place of what would use them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from relaxd.process.child import Child, ChildError
from relaxd.process.gpu_lease import GpuLease, LeaseOver
from relaxd.replica.gpus import Gpu, gpu_environment
from tests.kit.child_service import ChildStub, struct
from tests.kit.processes import COLD, start_python
from tests.kit.waiting import wait_until

MODULE = "tests.integration.rpc.echo_child"
ON_GPU = gpu_environment([Gpu("GPU-0", 0)])
WAIT = 30.0
"""Longest wait for what should happen at once, in seconds."""
PARENT = f"""
import asyncio, os, signal, sys, time
from relaxd.process.child import Child
from relaxd.process.gpu_lease import GpuLease
from tests.kit.child_service import ChildStub, struct
async def main():
    lease = GpuLease(lambda: print("over", flush=True))
    lease.begin(time.monotonic() + 60)
    child = await Child.start("{MODULE}", env={ON_GPU!r}, gpu_lease=lease)
    await ChildStub(child.channel).echo(struct(), timeout=30)
    print(child.pid, flush=True)
    sys.stdin.readline()
    lease.renew(time.monotonic() + 1.5)
    os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.shield(child.exited)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def over() -> threading.Event:
    return threading.Event()


@pytest.fixture
def lease(over: threading.Event) -> GpuLease:
    return GpuLease(over.set)


@contextlib.asynccontextmanager
async def started(lease: GpuLease | None) -> AsyncIterator[Child]:
    child = await Child.start(MODULE, env=ON_GPU if lease else {}, name="the engine", gpu_lease=lease)
    try:
        await ChildStub(child.channel).echo(struct(), timeout=30)
        yield child
    finally:
        child.kill()
        await child.exited


def lasting(seconds: float) -> float:
    return time.monotonic() + seconds


async def test_a_child_lives_as_long_as_its_lease_is_renewed(lease: GpuLease, over: threading.Event) -> None:
    lease.begin(lasting(60))
    async with started(lease) as child, started(None) as on_cpu:
        lease.renew(first := lasting(1.0))
        while time.monotonic() < first + 0.2:
            lease.renew(lasting(WAIT))
            await asyncio.sleep(0.1)
            assert child.alive
        lease.renew(lasting(0.3))
        ended = await asyncio.wait_for(asyncio.shield(child.exited), WAIT / 2)
        assert ended.exit_code == -signal.SIGKILL
        assert over.wait(WAIT)
        # What is over stays over, until GPUs are leased anew.
        lease.renew(lasting(60))
        with pytest.raises(ChildError, match="the engine can't be started: the lease on this replica's GPUs is over"):
            async with started(lease):
                pass
        with pytest.raises(LeaseOver):
            lease.begin(lasting(-1))
        lease.begin(lasting(60))
        async with started(lease):
            pass
        assert on_cpu.alive


async def test_no_child_is_left_when_the_lease_ends_while_it_starts(lease: GpuLease) -> None:
    lease.begin(lasting(0.5))  # less than the child takes for its imports
    child = await Child.start(MODULE, env=ON_GPU, gpu_lease=lease)
    await asyncio.wait_for(asyncio.shield(child.exited), WAIT)


async def test_a_stopped_child_is_killed(lease: GpuLease) -> None:
    lease.begin(lasting(60))
    async with started(lease) as child:
        os.kill(child.pid, signal.SIGSTOP)
        lease.renew(lasting(0.3))
        await asyncio.wait_for(asyncio.shield(child.exited), WAIT)


async def test_what_was_given_back_is_used_by_nobody(lease: GpuLease, over: threading.Event) -> None:
    lease.begin(lasting(60))
    async with started(lease) as forgotten:
        lease.give_back()
        await asyncio.wait_for(asyncio.shield(forgotten.exited), WAIT)
    assert not over.is_set()


def test_the_child_of_a_stopped_parent_ends_by_itself() -> None:
    with start_python(
        "-c", PARENT, environment=COLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdin is not None
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            assert child.is_running()
            parent.stdin.write("\n")  # it makes its lease short, and stops itself
            parent.stdin.flush()
            # Its parent can't reap it.
            wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE, "the child is dead")
            os.kill(parent.pid, signal.SIGCONT)
            assert parent.stdout.readline() == "over\n"
        finally:
            parent.kill()
