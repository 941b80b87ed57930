"""`python -m services.agent`."""

import asyncio

from relaxd.replica.replica_context import open_context
from relaxd.replica.replica_life import run_replica
from relaxd.roles import AGENT
from relaxd.rpc.service_settings import parse_settings
from services.agent.agent_service import AgentService


async def main() -> None:
    """Run the service until it is stopped."""
    async with open_context(parse_settings(AGENT)) as context:
        await run_replica(AgentService(context), context)


if __name__ == "__main__":
    asyncio.run(main())
