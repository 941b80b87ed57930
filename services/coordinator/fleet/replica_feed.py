"""The WatchReplicas stream: first all replicas of a role, then the changed ones."""

import time
from collections.abc import AsyncIterator, Iterable

from relaxd.v1.coordinator_pb2 import CallableReplica, WatchReplicasResponse
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from relaxd.waiting import steady_time
from services.coordinator.fleet.changes import Signal
from services.coordinator.fleet.registry import Registry, Replica

LOOK_SECONDS = 1.0
"""Maximum seconds between two checks of the registry, whose signal omits some changes, such as of a replica's
detail."""
MAX_GONE = 1000
"""Maximum number of a role's removed replicas to remember."""


class RoleChanges:
    """The replicas of a role at the last check, each with the number of its last change.

    One check serves all watchers. Watchers that have seen the same change number get the same message.
    """

    def __init__(self) -> None:
        self.changed = Signal()
        self.number = self._oldest = int(steady_time() * 1e6)
        """Number of the last change. It starts at the Unix time in microseconds, above all numbers of earlier
        coordinators."""
        self._replicas: dict[str, tuple[int, CallableReplica]] = {}
        self._gone: dict[str, int] = {}
        """Number of the change that removed each replica, in order."""
        self._messages: dict[int, WatchReplicasResponse] = {}
        """Cached messages up to change `number`, by the change number after which they begin."""

    def look(self, replicas: Iterable[Replica]) -> None:
        """Compare the replicas with those of the last check."""
        number = self.number + 1
        now = {replica.replica_id: callable_replica(replica) for replica in replicas}
        gone = self._replicas.keys() - now.keys()
        new = {name: one for name, one in now.items() if name not in self._replicas or self._replicas[name][1] != one}
        if not gone and not new:
            return
        for name in gone:
            del self._replicas[name]
        self._replicas |= {name: (number, one) for name, one in new.items()}
        self._gone = {name: went for name, went in self._gone.items() if name not in new} | dict.fromkeys(gone, number)
        while len(self._gone) > MAX_GONE:
            self._oldest = self._gone.pop(next(iter(self._gone)))
        self.number, self._messages = number, {}
        self.changed.fire()

    def since(self, number: int) -> WatchReplicasResponse:
        """Return the changes after a change number; all replicas if those changes aren't known."""
        if complete := not self._oldest <= number <= self.number:
            number = 0
        if number not in self._messages:
            self._messages[number] = WatchReplicasResponse(
                change=self.number,
                complete=complete,
                replicas=[one for changed, one in self._replicas.values() if complete or changed > number],
                gone=[] if complete else [name for name, went in self._gone.items() if went > number],
            )
        return self._messages[number]


class ReplicaFeed:
    """Produces the messages of WatchReplicas. Lives in the event loop."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._roles: dict[str, RoleChanges] = {}
        """Changes by role, for every role watched so far."""

    async def look_forever(self) -> None:
        """Check the registry whenever it changes."""
        news = self._registry.changed.follow()
        while True:
            for role, changes in self._roles.items():
                changes.look(self._registry.of_role(role))
            await news.wait(LOOK_SECONDS)  # idle: nothing is new

    async def watch(self, role: str, after: int, seconds: float) -> AsyncIterator[WatchReplicasResponse]:
        """Yield the changes since change number `after` at once, then each further change for `seconds`."""
        end = time.monotonic() + seconds
        if role not in self._roles:
            self._roles[role] = RoleChanges()
            self._roles[role].look(self._registry.of_role(role))
        changes = self._roles[role]
        message = changes.since(after)
        yield message
        while (left := end - time.monotonic()) > 0:
            if changes.number == message.change:
                await changes.changed.wait(left)  # idle: nothing is new
            else:
                message = changes.since(message.change)
                yield message


def callable_replica(replica: Replica) -> CallableReplica:
    """Return the message about a replica for its callers."""
    status = replica.status
    weights = status.weights if status.HasField("weights") else None
    return CallableReplica(
        replica_id=replica.replica_id,
        address=replica.registration.address,
        state=status.state,
        run_id=status.run_id,
        weights=weights,
        detail="" if status.state == REPLICA_STATE_READY and weights is not None else status.detail,
    )
