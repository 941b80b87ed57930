"""The interface between a launcher's server and the place where replicas run."""

from typing import Protocol

from relaxd.v1 import launcher_pb2 as pb


class Host(Protocol):
    """A place where replicas run. Its methods block, are called in threads, several at once, and raise RpcError."""

    roles: frozenset[str]
    """Roles that it can start."""

    def launch(self, launch_id: str, role: str, gpu_uuids: tuple[str, ...]) -> pb.Instance:
        """Start a replica, or return the one that has this launch id already."""

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        """Stop a replica. Returns once it has ended."""

    def restart(self, instance: str, replica_id: str) -> str:
        """Kill a process and start it again (see the proto). Returns a description of what was done."""

    def instances(self) -> list[pb.Instance]:
        """Return the replicas that were launched and not removed."""
