"""`python -m services.rollout`."""

import asyncio

from relaxd.replica.replica_context import open_context
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_server import SyncIds
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import rollout_pb2_grpc
from services.rollout.service.rollout_service import RolloutService
from services.rollout.service.server import RolloutServicer


async def main() -> None:
    """Run the service until it is stopped."""
    async with open_context(parse_settings("rollout")) as context:
        service = RolloutService(context)
        servicer = RolloutServicer(service, SyncIds(context.fence))
        calls = Service(rollout_pb2_grpc.add_RolloutServicer_to_server, servicer, "relaxd.v1.Rollout")
        try:
            await run_replica(service, context, [calls])
        finally:
            await service.close()


if __name__ == "__main__":
    asyncio.run(main())
