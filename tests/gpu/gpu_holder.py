"""A replica that leases one GPU and lets a child process use it: python -m tests.gpu.gpu_holder, flags as of a service.

The child takes a gigabyte and writes what it sees into the file named by HOLDER_FILE: its GPUs' UUIDs by torch.
"""

import asyncio
import json
import os
import subprocess
import sys

from relaxd.config import RunConfig
from relaxd.rpc.gpus import gpu_environment
from relaxd.rpc.replica import ReplicaService, ServiceStatus, run_replica
from relaxd.rpc.settings import parse_settings
from relaxd.v1 import replica_pb2
from relaxd.v1.coordinator_pb2 import Assignment

CHILD = """
import json, os, sys, torch
block = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
devices = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
with open(os.environ["HOLDER_FILE"], "w") as file:
    json.dump(devices, file)
print("ready", flush=True)
sys.stdin.read()
"""
"""Ends when its parent does, whose end of the pipe is closed then."""


class Holder(ReplicaService):
    role = replica_pb2.ROLE_ROLLOUT

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        gpus = await self.lease_gpus(1)
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=os.environ | gpu_environment(gpus),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.child.stdout is not None
        line = await asyncio.to_thread(self.child.stdout.readline)
        if line != b"ready\n":
            raise RuntimeError(f"the child ended with {self.child.wait()}")

    async def stop_run(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None

    async def pause_run(self) -> None: ...

    async def resume_run(self) -> None: ...

    async def drain(self, seconds: float) -> int:
        return 0

    def status(self) -> ServiceStatus:
        return ServiceStatus(detail=json.dumps(self.child.pid if self.child else None))


if __name__ == "__main__":
    asyncio.run(run_replica(Holder(), parse_settings("rollout")))
