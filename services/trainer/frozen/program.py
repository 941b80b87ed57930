"""The program of a role that holds a frozen model."""

import asyncio

from relaxd.replica.context import open_context
from relaxd.replica.replica import run_replica
from relaxd.rpc.settings import parse_settings
from services.trainer.frozen.service import FrozenModelService


def main(role: str) -> None:
    """Run the service of a role until it is told to end."""
    asyncio.run(_run(role))


async def _run(role: str) -> None:
    async with open_context(parse_settings(role)) as context:
        await run_replica(FrozenModelService(context, role), context)
