"""`python -m tests.fuzz.launcher`: a real launcher over a host that only remembers what it should start."""

import asyncio

from relaxd.replica.launcher_server import run_launcher
from relaxd.roles import SCALABLE_ROLES
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import launcher_pb2 as pb


class Memory:
    """A host that starts nothing."""

    roles = frozenset(SCALABLE_ROLES)

    def __init__(self) -> None:
        self.there: dict[str, pb.Instance] = {}

    def launch(self, request: pb.LaunchRequest) -> pb.Instance:
        launch_id = request.launch_id
        return self.there.setdefault(launch_id, pb.Instance(launch_id=launch_id, role=request.role))

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        self.there.pop(launch_id, None)

    def instances(self) -> list[pb.Instance]:
        return list(self.there.values())


if __name__ == "__main__":
    asyncio.run(run_launcher(Memory(), parse_settings("launcher")))
