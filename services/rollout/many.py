"""`python -m services.rollout.many COUNT`: many rollout replicas in one process, for `relaxd rehearse`.

Each replica has its own gRPC server, registration, heartbeats, connections to Redis and threads, as if it had a process
of its own. They share the interpreter and the event loop, so their engine must need no time: "scripted".
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from relaxd.replica.context import ReplicaContext, open_context
from relaxd.replica.gpus import GpuLeases
from relaxd.replica.replica import run_replica
from relaxd.rpc.server import Service
from relaxd.rpc.settings import parse_settings
from relaxd.v1 import rollout_pb2_grpc
from services.rollout.service.server import RolloutServicer
from services.rollout.service.service import RolloutService

THREADS = 64
"""Threads for the replicas' short calls to Redis."""


async def _replica(process: ReplicaContext, number: int) -> None:
    name = f"{process.settings.replica_id}-{number}"
    settings = replace(process.settings, replica_id=name, instance=name, port=0)
    gpus = GpuLeases(name, (), process.coordinator)
    context = ReplicaContext(settings, process.coordinator, gpus, process.stop)
    service = RolloutService(context)
    calls = Service(rollout_pb2_grpc.add_RolloutServicer_to_server, RolloutServicer(service), "relaxd.v1.Rollout")
    try:
        await run_replica(service, context, [calls])
    finally:
        await service.close()


async def main(count: int) -> None:
    """Run the replicas until they are told to end."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="shared"))
    async with open_context(parse_settings("rollout", [])) as process:
        await asyncio.gather(*(_replica(process, number) for number in range(1, count + 1)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
