"""python -m services.trainer: the trainer service, which owns the training ranks' Megatron world."""

import asyncio

from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import SyncIds, open_context
from relaxd.rpc.server import Service
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import trainer_pb2_grpc
from services.trainer.service.server import TrainerService, TrainerServicer


async def main() -> None:
    """Run the trainer service until it is stopped."""
    async with open_context(parse_settings("trainer")) as context:
        service = TrainerService(context)
        servicer = TrainerServicer(service, context.settings, SyncIds(context.fence))
        calls = Service(trainer_pb2_grpc.add_TrainerServicer_to_server, servicer, "relaxd.v1.Trainer")
        await run_replica(service, context, [calls])


if __name__ == "__main__":
    asyncio.run(main())
