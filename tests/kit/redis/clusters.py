"""A Redis Cluster of three primaries, some of which have replicas: all real servers, to be killed."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import redis

from relaxd.redis_client.lookups import slot_of
from tests.kit.ports import free_port
from tests.kit.redis.redis_server import RedisServer
from tests.kit.redis.replicas import PROMPT, has_replica, lagging
from tests.kit.waiting import wait_until

SLOTS = 16384
PRIMARIES = 3
SHARE = -(-SLOTS // PRIMARIES)
ANSWER_SECONDS = 2.0
"""Time in which a node says who owns what: another one is asked about a node that a test has stopped."""
DOWN_MILLISECONDS = 2000
"""Silence after which most primaries take a node for dead."""


class ClusterServers:
    """Three primaries with a third of the slots each. Those that have the keys of some tags have a replica each."""

    def __init__(
        self, folder: Path, *, replicated: Sequence[str] = ("run",), down_milliseconds: int = DOWN_MILLISECONDS
    ) -> None:
        """`replicated`: the tags; `primary` and `replica` are those of the first one."""
        self._tag = replicated[0]
        self._tags = tuple(replicated)
        self._with_replica = sorted({slot_of(tag) // SHARE for tag in replicated})
        self.servers: list[RedisServer] = []
        self._bus: list[int] = []
        for number in range(PRIMARIES + len(self._with_replica)):
            (folder / f"node-{number}").mkdir()
            self._bus.append(free_port())
            options = ("--cluster-enabled", "yes", "--cluster-port", str(self._bus[-1]))
            options += ("--cluster-node-timeout", str(down_milliseconds), "--cluster-require-full-coverage", "no")
            self.servers.append(RedisServer(folder / f"node-{number}", options=(*PROMPT, *options)))
        self.failovers = 0
        """How often a replica was promoted, as far as this object knows."""

    @property
    def url(self) -> str:
        """Where clients connect; the first node in it is dead."""
        places = ",".join(f"127.0.0.1:{port}" for port in (free_port(), *(server.port for server in self.servers)))
        return f"redis+cluster://{places}"

    @property
    def primary(self) -> RedisServer:
        """The owner of the replicated tag's slot, as most nodes see it."""
        return self.owner(self._tag)

    @property
    def replica(self) -> RedisServer:
        """The replica of that owner."""
        ranges = self.ask(self.primary, "SLOTS")
        port = next(one[3][1] for one in ranges if one[0] <= slot_of(self._tag) <= one[1])
        return self._at(port)

    @property
    def primaries(self) -> list[RedisServer]:
        """The nodes that own slots."""
        owners = set(self._owners().values())
        return [server for server in self.servers if server.port in owners]

    def start(self) -> "ClusterServers":
        """Start all of them, and wait until they know each other and the replica has what its primary has."""
        for number, server in enumerate(self.servers):
            server.start()
            self.ask(server, "SET-CONFIG-EPOCH", number + 1)
        for number, server in enumerate(self.servers[:PRIMARIES]):
            self.ask(server, "ADDSLOTSRANGE", number * SHARE, min(SLOTS, (number + 1) * SHARE) - 1)
        for server, bus in zip(self.servers[1:], self._bus[1:], strict=True):
            self.ask(self.servers[0], "MEET", "127.0.0.1", server.port, bus)
        self.await_agreement()
        for replica, number in zip(self.servers[PRIMARIES:], self._with_replica, strict=True):
            self.ask(replica, "REPLICATE", self.id_of(self.servers[number]))
        self.await_replica()
        return self

    def owner(self, tag: str) -> RedisServer:
        """The node that has the keys of a tag."""
        return self._at(self._owners()[slot_of(tag)])

    def tags_of(self, server: RedisServer) -> Iterator[str]:
        """Tags whose keys are on a node."""
        return (tag for tag in (f"run-{number}" for number in count()) if self.owner(tag) is server)

    def ask(self, server: RedisServer, *words: str | int, seconds: float = 10.0) -> Any:
        """Send a node a CLUSTER command."""
        with redis.Redis.from_url(server.url, protocol=2, decode_responses=True, socket_timeout=seconds) as client:
            return client.execute_command("CLUSTER", *words)

    def id_of(self, server: RedisServer) -> str:
        """The id of a node."""
        return str(self.ask(server, "MYID"))

    def await_agreement(self) -> None:
        """Wait until all nodes know each other, and see the cluster in order."""

        def agree() -> bool:
            seen = [str(self.ask(server, "INFO")) for server in self.servers]
            return all("cluster_state:ok" in one and f"cluster_known_nodes:{len(self.servers)}" in one for one in seen)

        wait_until(agree, "the nodes of the cluster")

    def await_replica(self) -> None:
        """Wait until the replica has what the primary has, and all nodes know it."""

        def known() -> bool:
            return all(
                sum(len(one) - 3 for one in self.ask(server, "SLOTS")) >= len(self._with_replica)
                for server in self.servers
            )

        def have_replicas() -> bool:
            return all(has_replica(self.owner(tag), tag) for tag in self._tags)

        wait_until(have_replicas, "the replicas", forgive=(redis.ConnectionError,))
        wait_until(known, "the nodes to see the replica")
        self.await_agreement()

    def kill_primary(self, tag: str = "") -> RedisServer:
        """Kill the primary of a replicated tag (SIGKILL), by default of the first one, and return it."""
        dead = self.owner(tag or self._tag)
        dead.kill()
        return dead

    def await_promotion(self, before: RedisServer) -> None:
        """Wait until other nodes own all slots."""
        wait_until(lambda: before not in self.primaries, "the nodes to promote the replica")
        self.failovers += 1

    def hand_over(self) -> None:
        """Have the replica take over; the old primary's connections stay open."""
        before = self.primary
        self.ask(self.replica, "FAILOVER")
        self.await_promotion(before)
        self.await_replica()

    def revive(self) -> None:
        """Start the killed node again, which becomes the replica of the other."""
        for server in self.servers:
            if server.process is None:
                server.start()
        self.await_replica()

    def lag(self, seconds: float = 0.0, *, cut: bool = True) -> contextlib.AbstractContextManager[None]:
        """Let the replica lag; see `lagging`."""
        return lagging(self.replica, seconds, cut=cut)

    @contextlib.contextmanager
    def moving(self, tag: str, target: RedisServer) -> Iterator[None]:
        """Move a tag's slot to another node: half of its keys before the context's body, the rest after it."""
        slot, source = slot_of(tag), self.owner(tag)
        self.ask(target, "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.ask(source, "SETSLOT", slot, "MIGRATING", self.id_of(target))
        keys = sorted(self.ask(source, "GETKEYSINSLOT", slot, 10_000))
        self._migrate(source, target, keys[: len(keys) // 2])
        yield
        while rest := self.ask(source, "GETKEYSINSLOT", slot, 100):
            self._migrate(source, target, rest)
        owner = self.id_of(target)
        for server in (target, source, *(one for one in self.servers if one not in (target, source))):
            if server in self.primaries:
                self.ask(server, "SETSLOT", slot, "NODE", owner)
        wait_until(lambda: all(self._owners(one)[slot] == target.port for one in self.servers), "the new owner")

    def stop(self) -> None:
        """Kill all of them."""
        for server in self.servers:
            server.kill()

    def _at(self, port: int) -> RedisServer:
        return next(server for server in self.servers if server.port == port)

    def _migrate(self, source: RedisServer, target: RedisServer, keys: list[str]) -> None:
        with redis.Redis.from_url(source.url, socket_timeout=30.0) as client:
            client.migrate("127.0.0.1", target.port, keys, 0, 10_000)

    def _owners(self, asked: RedisServer | None = None) -> dict[int, int]:
        """The port of each slot's owner, as a node sees it that lives and whose cluster is in order, or as this one."""
        for server in [asked] if asked else [one for one in self.servers if one.process is not None]:
            try:
                if asked or "cluster_state:ok" in str(self.ask(server, "INFO", seconds=ANSWER_SECONDS)):
                    ranges = self.ask(server, "SLOTS", seconds=ANSWER_SECONDS)
                    return {slot: one[2][1] for one in ranges for slot in range(one[0], one[1] + 1)}
            except redis.TimeoutError:
                if asked:
                    raise
        raise AssertionError("no node sees the cluster in order")
