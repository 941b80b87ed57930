"""Faults of Redis servers that have replicas: a primary dies, stands still or hands over, a replica dies."""

import random
import signal
import time
from functools import partial

from relaxd.redis_client import COORDINATOR
from tests.chaos.faults import LONG_SECONDS, Fault, kill_now
from tests.chaos.planes.primaries import RUN
from tests.chaos.stack import ChaosStack
from tests.kit.redis.clusters import ClusterServers
from tests.kit.redis.redis_server import RedisServer
from tests.kit.redis.sentinels import WatchedRedis

LAG_SECONDS = 0.3
"""Time that a replica gets nothing before its primary is killed."""


def _servers(stack: ChaosStack) -> WatchedRedis | ClusterServers:
    if stack.primaries is None:
        raise ValueError("this job has one Redis: start it with --redis sentinel or --redis cluster")
    return stack.primaries


def _take_over(servers: WatchedRedis | ClusterServers, dead: RedisServer) -> None:
    """Wait until the replica of a dead primary is the next, and start the dead one again as the replica of that."""
    servers.await_promotion(dead)
    servers.revive()


def kill_primary(stack: ChaosStack, rng: random.Random) -> float:
    """Its replica takes over, and it comes back as the replica of that."""
    servers, now = _servers(stack), time.time()
    _take_over(servers, servers.kill_primary())
    return now


def kill_primary_twice(stack: ChaosStack, rng: random.Random) -> float:
    """The second one dies as soon as it has a replica."""
    kill_primary(stack, rng)
    return kill_primary(stack, rng)


def kill_primary_ahead(stack: ChaosStack, rng: random.Random) -> float:
    """The replica gets nothing for a while before: what it lacks was acknowledged to nobody."""
    servers = _servers(stack)
    dead = servers.primary
    with servers.lag(LAG_SECONDS):
        now = time.time()
        dead.kill()
    _take_over(servers, dead)
    return now


def kill_with(role: str, stack: ChaosStack, rng: random.Random) -> float:
    """A service dies with the primary, and starts while there is none."""
    servers = _servers(stack)
    process = stack.process(rng.choice(stack.names(role)))
    dead, now = servers.kill_primary(), kill_now([process])
    _take_over(servers, dead)
    return now


def kill_primary_of_coordinator(stack: ChaosStack, rng: random.Random) -> float:
    """In a cluster: the node with the coordinator's keys, which needs not be the run's."""
    servers, now = _servers(stack), time.time()
    assert isinstance(servers, ClusterServers)
    _take_over(servers, servers.kill_primary(COORDINATOR))
    return now


def hand_over(stack: ChaosStack, rng: random.Random) -> float:
    """The replica becomes the primary, and connections to the old one stay open."""
    _servers(stack).hand_over()
    return time.time()


def stall_primary(stack: ChaosStack, rng: random.Random) -> float:
    """It stands still until its replica has taken over, and wakes up as a primary that nobody follows."""
    servers = _servers(stack)
    primary, now = servers.primary, time.time()
    assert primary.process is not None
    primary.process.send_signal(signal.SIGSTOP)
    try:
        servers.await_promotion(primary)
    finally:
        primary.process.send_signal(signal.SIGCONT)
    servers.await_replica()
    return now


def kill_replica(stack: ChaosStack, rng: random.Random) -> float:
    """Nothing is acknowledged until it is back, and its primary lives."""
    servers = _servers(stack)
    servers.replica.kill()
    time.sleep(LONG_SECONDS)
    servers.revive()
    return time.time()


def lag_replica(stack: ChaosStack, rng: random.Random) -> float:
    """It stands still for longer than a write waits for it."""
    with _servers(stack).lag(LONG_SECONDS, cut=False):
        pass
    return time.time()


def move_slot(stack: ChaosStack, rng: random.Random) -> float:
    """In a cluster: the run's keys move to another node, half of them a moment before the rest."""
    servers = _servers(stack)
    assert isinstance(servers, ClusterServers)
    here = servers.primary
    with servers.moving(RUN, rng.choice([one for one in servers.primaries if one is not here])):
        time.sleep(LAG_SECONDS)
    servers.await_replica()
    return time.time()


def primary_faults(servers: str) -> list[Fault]:
    """Every kind, for servers behind Sentinels or in a cluster."""
    faults = [
        Fault("primary killed", kill_primary),
        Fault("primary killed ahead of its replica", kill_primary_ahead),
        Fault("primary killed twice", kill_primary_twice),
        *(
            Fault(f"primary killed with {role}", partial(kill_with, role))
            for role in ("trainer", "coordinator", "rollout", "reward")
        ),
        Fault("primary handed over", hand_over),
        Fault("primary stalls until its replica takes over", stall_primary),
        Fault("replica killed", kill_replica),
        Fault("replica stalls", lag_replica),
    ]
    if servers == "cluster":
        faults += [
            Fault("primary of the coordinator killed", kill_primary_of_coordinator),
            Fault("slot of the run moved", move_slot),
        ]
    return faults
