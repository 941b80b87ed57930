"""python -m services.trainer: the service that owns the Megatron world that learns."""

import asyncio

from relaxd.replica.replica import run_replica
from relaxd.rpc.settings import parse_settings
from relaxd.v1 import trainer_pb2_grpc
from services.trainer.service.server import TrainerService, TrainerServicer


def main() -> None:
    """Run the service until it is told to end."""
    settings = parse_settings("trainer")
    service = TrainerService(settings)
    servicer = TrainerServicer(service, settings)
    asyncio.run(
        run_replica(
            service, settings, [(trainer_pb2_grpc.add_TrainerServicer_to_server, servicer, "relaxd.v1.Trainer")]
        )
    )


if __name__ == "__main__":
    main()
