"""`python -m services.rollout`: starts the rollout service."""

import asyncio

from relaxd.replica.replica_service import open_context
from relaxd.rpc.service_settings import parse_settings
from services.rollout.service.server import run_rollout


async def main() -> None:
    """Run the rollout service until it is stopped."""
    async with open_context(parse_settings("rollout")) as context:
        await run_rollout(context)


if __name__ == "__main__":
    asyncio.run(main())
