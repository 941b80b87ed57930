"""Faults of data nodes, and of what goes to them and comes from them."""

import random
import time
from functools import partial

import psutil

from tests.chaos.faults import LENGTHS, LONG_SECONDS, Fault, await_moment, limited_memory, stand_still, worsen
from tests.chaos.planes.data_nodes import DataNodes
from tests.chaos.planes.payload_faults import deaths_at_scripts, strike_first
from tests.chaos.proxy import Moment
from tests.chaos.stack import ChaosStack

STEPS = {
    "write": "SET *:columns:*",
    "keep": "PERSIST *:columns:*",
    "read": "MGET *:columns:*",
    "free": "UNLINK *:columns:*",
}
"""Steps of a payload's life on a data node, each with a pattern of its command."""


def data_node_faults() -> list[Fault]:
    """List the faults of nodes, and a broken connection before and after each command that they get.

    Those who write there also die before and after each script on the board's Redis.
    """
    moments: tuple[Moment, Moment] = ("before", "after")
    return [
        Fault("data node killed", kill),
        *(Fault(f"data node stalls {length}", partial(stall, seconds)) for length, seconds in LENGTHS.items()),
        Fault("data node full", fill),
        *(Fault(f"data node: {how}", partial(network, how)) for how in ("cut", "delay", "drop")),
        *(
            Fault(f"data node: cut {moment} {step}", partial(strike, pattern, moment))
            for step, pattern in STEPS.items()
            for moment in moments
        ),
        *deaths_at_scripts(),
    ]


def _nodes(stack: ChaosStack) -> DataNodes:
    assert stack.data_nodes is not None, "this job has no data nodes"
    return stack.data_nodes


def kill(stack: ChaosStack, rng: random.Random) -> float:
    """A node dies, and is there again with what is in its append-only file after longer than a group's lease."""
    server = rng.choice(_nodes(stack).servers)
    server.kill()
    time.sleep(LONG_SECONDS)
    server.start()
    return time.time()


def stall(seconds: float, stack: ChaosStack, rng: random.Random) -> float:
    """A node stands still."""
    process = rng.choice(_nodes(stack).servers).process
    assert process is not None
    return stand_still([psutil.Process(process.pid)], seconds, stack)


def fill(stack: ChaosStack, rng: random.Random) -> float:
    """A node has no memory left, until a write was refused and for longer than a group's lease.

    Raises MomentMissed: nobody wanted to write there.
    """
    client = rng.choice(_nodes(stack).clients)
    client.config_resetstat()
    with limited_memory(client, 1):
        time.sleep(LONG_SECONDS)
        await_moment(lambda: "errorstat_OOM" in client.info("errorstats"), "a refused write")
    return time.time()


def network(how: str, stack: ChaosStack, rng: random.Random) -> float:
    """cut, delay or drop everything between all services and a node; for shorter or longer than leases."""
    return worsen(how, [rng.choice(_nodes(stack).links)], stack, rng)


def strike(pattern: str, moment: Moment, stack: ChaosStack, rng: random.Random) -> float:
    """Break the connection of whoever sends the command first, to any node."""
    return strike_first(stack, [(link, []) for link in _nodes(stack).links], pattern, moment, "a data node")


SHORT_SUITE = ("data node killed", "data node full", "data node: cut after write", "data node: cut before keep")
"""Faults of the ordinary tests."""
