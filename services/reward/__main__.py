"""`python -m services.reward`: starts the reward service."""

import asyncio

from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import open_context
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import reward_pb2_grpc
from services.reward.service import RewardService, RewardServicer


async def main() -> None:
    """Run the reward service until it is stopped."""
    async with open_context(parse_settings("reward")) as context:
        service = RewardService(context)
        servicer = RewardServicer(service, context.settings.allowed_rewards)
        calls = Service(reward_pb2_grpc.add_RewardServicer_to_server, servicer, "relaxd.v1.Reward")
        try:
            await run_replica(service, context, [calls])
        finally:
            service.pool.close()


if __name__ == "__main__":
    asyncio.run(main())
