"""`python -m services.advantage`."""

import asyncio

from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import open_context
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import advantage_pb2_grpc
from services.advantage.service import AdvantageService, AdvantageServicer


async def main() -> None:
    """Run the advantage service until it is stopped."""
    async with open_context(parse_settings("advantage")) as context:
        calls = Service(advantage_pb2_grpc.add_AdvantageServicer_to_server, AdvantageServicer(), "relaxd.v1.Advantage")
        await run_replica(AdvantageService(context), context, [calls])


if __name__ == "__main__":
    asyncio.run(main())
