"""Faults of the host of prompts' media."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from relaxd.v1 import coordinator_pb2 as pb
from tests.chaos.faults import LONG_SECONDS, Fault, await_moment, kill_service
from tests.chaos.stack import RUN, ChaosStack


def media_host_faults() -> list[Fault]:
    """List the faults: the host is away, also while the coordinator dies and reads the data again."""
    return [Fault("media host away", leave), Fault("media host away, coordinator dies", leave_and_kill)]


def leave(stack: ChaosStack, rng: random.Random) -> float:
    """The host refuses connections until the run waits for it, and for longer than a group's lease."""
    with _away(stack):
        time.sleep(LONG_SECONDS)
    return time.time()


def leave_and_kill(stack: ChaosStack, rng: random.Random) -> float:
    """The same, and the coordinator is killed meanwhile."""
    with _away(stack):
        kill_service("coordinator", stack, rng)
        time.sleep(LONG_SECONDS)
    return time.time()


@contextmanager
def _away(stack: ChaosStack) -> Iterator[None]:
    """Stop the host, and wait until the run waits for it; start it at the end. Raises MomentMissed."""
    assert stack.media_host is not None, "this job has no media host"
    stack.media_host.stop()
    try:
        await_moment(
            lambda: stack.coordinator.run(RUN).wait.kind == pb.WAIT_KIND_MEDIA, "the run waits for its media host", 0.1
        )
        yield
    finally:
        stack.media_host.start()
