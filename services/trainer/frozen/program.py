"""The program of a role whose model runs in ranks."""

import asyncio

from relaxd.replica.replica_context import open_context
from relaxd.replica.replica_life import run_replica
from relaxd.rpc.service_settings import parse_settings
from services.trainer.frozen.service import StageService


def main(role: str, service: type[StageService] = StageService) -> None:
    """Run the service of a role until it is stopped."""
    asyncio.run(_run(role, service))


async def _run(role: str, service: type[StageService]) -> None:
    async with open_context(parse_settings(role)) as context:
        await run_replica(service(context, role), context)
