"""`python -m services.reward`."""

import asyncio

from relaxd.replica.replica import run_replica
from relaxd.rpc.settings import parse_settings
from relaxd.v1 import reward_pb2_grpc
from services.reward.service import RewardService


async def main() -> None:
    """Live until SIGTERM."""
    settings = parse_settings("reward")
    service = RewardService(settings)
    try:
        registration = (reward_pb2_grpc.add_RewardServicer_to_server, service, "relaxd.v1.Reward")
        await run_replica(service, settings, [registration])
    finally:
        service.close()


if __name__ == "__main__":
    asyncio.run(main())
