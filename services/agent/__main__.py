"""`python -m services.agent`."""

import asyncio

from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import open_context
from relaxd.roles import AGENT
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import agent_pb2_grpc
from services.agent.service import AgentService, AgentServicer


async def main() -> None:
    """Run the agent service until it is stopped."""
    async with open_context(parse_settings(AGENT)) as context:
        service = AgentService(context)
        calls = Service(agent_pb2_grpc.add_AgentServicer_to_server, AgentServicer(service), "relaxd.v1.Agent")
        await run_replica(service, context, [calls])


if __name__ == "__main__":
    asyncio.run(main())
