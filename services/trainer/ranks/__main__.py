"""python -m services.trainer.ranks: the service for a trainer's ranks on this host."""

import asyncio

from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import open_context
from relaxd.roles import RANKS
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import ranks_pb2_grpc
from services.trainer.ranks.server import RanksService, RanksServicer


async def main() -> None:
    """Run the service until it is stopped."""
    async with open_context(parse_settings(RANKS)) as context:
        service = RanksService(context)
        calls = Service(ranks_pb2_grpc.add_RanksServicer_to_server, RanksServicer(service), "relaxd.v1.Ranks")
        await run_replica(service, context, [calls])


if __name__ == "__main__":
    asyncio.run(main())
