"""A replica that leases the one GPU that this machine is said to have, with the flags of a service.

Its child stands for an engine. HOLDER_FOLDER has a file for each child that was ever started, named after its process
id and replica; a holder that is granted the GPU while another's child is there writes a file `conflict`.
"""

import asyncio
import os
from pathlib import Path

from relaxd.config import RunConfig
from relaxd.process.child import Child
from relaxd.replica import gpus
from relaxd.replica.gpus import Gpu, gpu_environment
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus, open_context
from relaxd.roles import ROLLOUT
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1.coordinator_pb2 import Assignment
from tests.kit.processes import is_alive

GPU = Gpu("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 0)


class Holder(ReplicaService):
    role = ROLLOUT

    def __init__(self, context: ReplicaContext) -> None:
        self.context = context
        self.name = context.settings.replica_id
        self.folder = Path(os.environ["HOLDER_FOLDER"])
        self.child: Child | None = None

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        leased = await self.context.gpus.lease(1)
        pids = [int(path.name.partition("-")[0]) for path in self.folder.glob("*-*")]
        for pid in filter(is_alive, pids):
            (self.folder / "conflict").write_text(f"{self.name} was granted what {pid} still has")
        self.child = await Child.start(
            "tests.integration.rpc.echo_child", env=gpu_environment(leased), gpu_lease=self.context.gpus.child_lease
        )
        (self.folder / f"{self.child.pid}-{self.name}").touch()

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
        return ServiceStatus()


async def main() -> None:
    async with open_context(parse_settings("rollout")) as context:
        await run_replica(Holder(context), context)


if __name__ == "__main__":
    gpus._all_gpus = lambda: (GPU,)  # type: ignore[assignment]
    asyncio.run(main())
