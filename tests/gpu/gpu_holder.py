"""A replica that leases one GPU and lets a child process use it: python -m tests.gpu.gpu_holder, flags as of a service.

What its child sees is written into the file named by HOLDER_FILE: its GPUs' UUIDs by torch.
"""

import asyncio
import json
import os
from pathlib import Path

from relaxd.config import RunConfig
from relaxd.process.child import Child
from relaxd.replica.gpus import gpu_environment
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus, open_context
from relaxd.roles import ROLLOUT
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1.coordinator_pb2 import Assignment
from tests.kit.child_service import ChildStub, struct


class Holder(ReplicaService):
    role = ROLLOUT

    def __init__(self, context: ReplicaContext) -> None:
        self.context = context
        self.child: Child | None = None

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        gpus = await self.context.gpus.lease(1)
        lease = self.context.gpus.child_lease
        self.child = await Child.start("tests.gpu.gpu_child", env=gpu_environment(gpus), gpu_lease=lease)
        devices = list((await ChildStub(self.child.channel).hold(struct(), timeout=60))["uuids"])
        Path(os.environ["HOLDER_FILE"]).write_text(json.dumps(devices))

    async def stop_run(self) -> None:
        if self.child is not None:
            self.child.kill()
            await self.child.exited
            self.child = None

    async def pause_run(self) -> None: ...

    async def resume_run(self) -> None: ...

    async def drain(self, seconds: float) -> int:
        return 0

    def status(self) -> ServiceStatus:
        return ServiceStatus(detail=json.dumps(self.child.pid if self.child else None))


async def main() -> None:
    async with open_context(parse_settings("rollout")) as context:
        await run_replica(Holder(context), context)


if __name__ == "__main__":
    asyncio.run(main())
