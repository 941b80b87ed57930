"""`python -m services.rollout`."""

import asyncio

from relaxd.replica.replica import run_replica
from relaxd.rpc.settings import parse_settings
from relaxd.v1 import rollout_pb2_grpc
from services.rollout.service.server import RolloutServicer
from services.rollout.service.service import RolloutService


async def main() -> None:
    """Live until SIGTERM."""
    settings = parse_settings("rollout")
    service = RolloutService(settings)
    try:
        registration = (rollout_pb2_grpc.add_RolloutServicer_to_server, RolloutServicer(service), "relaxd.v1.Rollout")
        await run_replica(service, settings, [registration])
    finally:
        await service.close()


if __name__ == "__main__":
    asyncio.run(main())
