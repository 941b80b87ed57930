"""A trainer and its other hosts as processes, here or in namespaces, for tests."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import redis

from relaxd.config import RunConfig
from relaxd.roles import RANKS
from relaxd.v1 import coordinator_pb2, replica_pb2
from tests.integration.trainer.service_kit import Feeder, ScriptedCoordinator, TrainerProcess, export
from tests.kit.namespaces import Node
from tests.kit.processes import kill, start_python
from tests.kit.waiting import wait_until

HOST = "services.trainer.ranks"


class HostsCoordinator(ScriptedCoordinator):
    """A scripted coordinator that also registers hosts, and tells the trainer of them."""

    def __init__(self, config: RunConfig, folder: Path, host: str = "127.0.0.1") -> None:
        super().__init__(config, folder, host=host)
        self.hosts: dict[str, coordinator_pb2.CallableReplica] = {}
        self.gauges: dict[str, dict[str, float]] = {}
        """Gauges in the last heartbeat of each host."""

    def Register(self, request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterResponse:
        registration = request.registration
        if registration.role != RANKS:
            return super().Register(request, context)
        name, address = registration.replica_id, registration.address
        self._hear(hosts=self.hosts | {name: coordinator_pb2.CallableReplica(replica_id=name, address=address)})
        return coordinator_pb2.RegisterResponse(
            lease_seconds=5, gpu_lease_seconds=30, heartbeat_seconds=0.1, assignment=self.assignment
        )

    def Heartbeat(self, request: coordinator_pb2.HeartbeatRequest, context: Any) -> coordinator_pb2.HeartbeatResponse:
        status = request.status
        if status.role != RANKS:
            return super().Heartbeat(request, context)
        known = self.hosts[status.replica_id]
        self.gauges[status.replica_id] = dict(status.gauges)
        told = {"state": status.state, "run_id": status.run_id, "detail": status.detail}
        if any(getattr(known, name) != value for name, value in told.items()):
            new = coordinator_pb2.CallableReplica(replica_id=known.replica_id, address=known.address, **told)
            self._hear(hosts=self.hosts | {known.replica_id: new})
        return coordinator_pb2.HeartbeatResponse(assignment=self.assignment, gpu_lease_seconds=30)

    def WatchReplicas(
        self, request: coordinator_pb2.WatchReplicasRequest, context: Any
    ) -> Iterator[coordinator_pb2.WatchReplicasResponse]:
        assert request.role == RANKS
        told = None
        while context.is_active():
            with self._condition:
                self._condition.wait_for(lambda: self.hosts is not told, 0.2)  # noqa: B023
                told, before = self.hosts, told
            if told is not before:
                yield coordinator_pb2.WatchReplicasResponse(change=1, complete=True, replicas=told.values())

    def host_is(self, name: str, state: replica_pb2.ReplicaState.ValueType) -> bool:
        """Return whether a host has said that it is in this state."""
        return name in self.hosts and self.hosts[name].state == state


class Host:
    """The service of a host's ranks as a process, which can be started again."""

    def __init__(
        self,
        number: int,
        coordinator: HostsCoordinator,
        redis_url: str,
        node: Node | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._environment = environment
        self.name = f"ranks-{number}"
        self.node = node
        self._words = [
            *("-m", HOST, "--coordinator", f"{coordinator.host}:{coordinator.port}", "--redis", redis_url),
            *("--replica-id", self.name, "--grace-seconds", "5", *listening(node)),
        ]
        self.start()

    def start(self) -> None:
        self.process = start_python(*self._words, environment=self._environment, within=self.node)

    def correct(self, environment: Mapping[str, str]) -> None:
        """Start it again with other variables."""
        self._environment = environment
        self.start()

    def rank_pids(self) -> list[int]:
        """Return the process ids of its ranks by its last heartbeat, without those of spare ones."""
        gauges = self._coordinator.gauges.get(self.name, {})
        return [int(pid) for name, pid in gauges.items() if name.endswith("_pid")]

    def kill(self) -> None:
        """Kill it with its ranks, at once, unless it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        kill(self.process)


class TrainerOverHosts:
    """A run whose trainer is on several hosts."""

    def __init__(self, coordinator: HostsCoordinator, feeder: Feeder, trainer: TrainerProcess, hosts: list[Host]):
        self.coordinator, self.feeder, self.trainer, self.hosts = coordinator, feeder, trainer, hosts
        self.term, self.step = 1, 0

    def begin(self) -> None:
        """Wait for the first weights."""
        self.coordinator.wait_for_version(1, 0)

    def train(self, steps: int) -> None:
        """Train steps, one after the other."""
        for _ in range(steps):
            self.feeder.feed(2, self.step)
            self.step += 1
            self.coordinator.wait_for_version(self.term, self.step)

    def again(self) -> float:
        """Wait until the weights are announced in the next term. Returns the seconds until its ranks were started.

        How long these take to load depends on the machine.
        """
        begun, last = time.monotonic(), self.term
        self.coordinator.wait(lambda: self.coordinator.status.detail == "starting the ranks")
        seconds = time.monotonic() - begun
        self.coordinator.wait(lambda: self.coordinator.announced[-1][0] > last)
        self.term = self.coordinator.announced[-1][0]
        self.coordinator.wait_for_version(self.term, self.step)
        print(f"started again after {seconds:.1f} s, and trains after {time.monotonic() - begun:.1f} s")
        return seconds

    def check_books(self) -> None:
        """Check that each group was trained once, and none was lost."""
        counts = self.feeder.board.counts()
        counts.check()
        assert (counts.trained, counts.open, counts.dropped) == (2 * self.step, 0, 0)
        assert [entry.step for entry in self.feeder.board.ledger()] == list(range(1, self.step + 1))

    def exported(self) -> bytes:
        """Return the bytes of the model's files."""
        files = sorted(export(self.trainer, f"model-{self.step}").glob("*.safetensors"))
        return b"".join(file.read_bytes() for file in files)


def listening(node: Node | None) -> tuple[str, ...]:
    """Return the flags with which a service listens in a node."""
    return ("--host", node.address, "--allow-insecure") if node is not None else ()


@contextlib.contextmanager
def trainer_over_hosts(
    config: RunConfig,
    redis_url: str,
    folder: Path,
    *,
    nodes: Sequence[Node] = (),
    spares: int = 0,
    without: Node | None = None,
    host: str = "127.0.0.1",
    environments: Sequence[Mapping[str, str]] = (),
) -> Iterator[TrainerOverHosts]:
    """Start a trainer and its other hosts, in nodes if there are some, and `spares` more, with an empty Redis.

    `without`: place of all other hosts instead. `host` is this process's address, as they reach it. `environments` are
    set on top of this process's, the first for the trainer's host.
    """
    folder.mkdir(exist_ok=True)
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        client.flushall()
    feeder, coordinator = Feeder(redis_url, config), HostsCoordinator(config, folder, host)
    places: list[Node | None] = [*nodes] or [None] * (config.trainer.hosts + spares)
    variables: list[Mapping[str, str] | None] = [*environments] or [None] * len(places)
    with contextlib.ExitStack() as stack:
        stack.callback(feeder.board.close)
        stack.callback(coordinator.close)
        hosts = []
        for number, node in enumerate(places[1:], 1):
            hosts.append(Host(number, coordinator, redis_url, without or node, variables[number]))
            stack.callback(hosts[-1].kill)
        first = places[0]
        trainer = TrainerProcess(
            coordinator, redis_url, variables[0], "services.trainer", *listening(first), within=first
        )
        stack.callback(trainer.close)
        yield TrainerOverHosts(coordinator, feeder, trainer, hosts)


def ranks_ended(pids: Sequence[int]) -> None:
    """Wait until processes have ended."""
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the ranks have ended")
