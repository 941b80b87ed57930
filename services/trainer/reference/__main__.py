"""python -m services.trainer.reference: the service that computes log-probs under the reference model."""

import asyncio

from relaxd.replica.context import open_context
from relaxd.replica.replica import run_replica
from relaxd.rpc.settings import parse_settings
from services.trainer.reference.service import ReferenceService


async def main() -> None:
    """Run the service until it is told to end."""
    async with open_context(parse_settings("reference")) as context:
        await run_replica(ReferenceService(context), context)


if __name__ == "__main__":
    asyncio.run(main())
