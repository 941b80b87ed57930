"""`python -m services.rollout.judge`: the service that answers the questions of rewards."""

import asyncio

from relaxd.replica.replica_context import open_context
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_server import SyncIds
from relaxd.roles import JUDGE
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import judge_pb2_grpc
from services.rollout.judge.judge_service import JudgeService
from services.rollout.judge.server import JudgeServicer


async def main() -> None:
    """Run the service until it is stopped."""
    async with open_context(parse_settings(JUDGE)) as context:
        service = JudgeService(context)
        servicer = JudgeServicer(service, SyncIds(context.fence))
        calls = Service(judge_pb2_grpc.add_JudgeServicer_to_server, servicer, "relaxd.v1.Judge")
        await run_replica(service, context, [calls])


if __name__ == "__main__":
    asyncio.run(main())
