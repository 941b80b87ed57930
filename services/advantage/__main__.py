"""`python -m services.advantage`."""

import asyncio

from relaxd.replica.replica import run_replica
from relaxd.rpc.settings import parse_settings
from relaxd.v1 import advantage_pb2_grpc
from services.advantage.service import AdvantageService


async def main() -> None:
    """Live until SIGTERM."""
    settings = parse_settings("advantage")
    service = AdvantageService(settings)
    await run_replica(
        service, settings, [(advantage_pb2_grpc.add_AdvantageServicer_to_server, service, "relaxd.v1.Advantage")]
    )


if __name__ == "__main__":
    asyncio.run(main())
