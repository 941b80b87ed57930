"""Services that get stuck, answer wrongly or don't start, on command.

`python -m tests.integration.health.doubles FOLDER ROLE` takes the flags of a service.

Files in FOLDER are the commands. FAULT-INSTANCE (fail: don't start, refuse: don't start a run, invalid: find its
settings wrong, stuck: get nothing done,
wrong: fail weight synchronisations) holds for the process whose id is its content, or for every process of the instance
when it is empty.
"""

import asyncio
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.board import CRITIC_STATE, VALUES, Column, Delivery
from relaxd.board.worker import Process
from relaxd.config import RunConfig
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, open_context
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import CRITIC
from relaxd.rpc.errors import Aborted, InvalidArgument
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from relaxd.v1.coordinator_pb2 import Assignment

FOLDER = Path(sys.argv[1])
ME, INSTANCE = os.environ["RELAXD_REPLICA_ID"], os.environ["RELAXD_INSTANCE"]
os.environ["PEER_LOG"] = str(FOLDER / f"{ME}.calls")


def is_to(fault: str) -> bool:
    try:
        return (FOLDER / f"{fault}-{INSTANCE}").read_text() in ("", ME)
    except FileNotFoundError:
        return False


async def run_double(
    role: str, kind: Callable[[ReplicaContext], ReplicaService], add: Callable[[Any, Any], None]
) -> None:
    async with open_context(parse_settings(role, sys.argv[3:])) as context:
        double = kind(context)
        await run_replica(double, context, [(add, double, f"relaxd.v1.{role.title()}")])


class Critic(StageReplica):
    """Gives the value 0 to every token, and learns nothing."""

    role = stage = CRITIC

    async def prepare(self, config: RunConfig) -> tuple[Process, int]:
        if is_to("refuse"):
            raise FileNotFoundError("model.safetensors is gone")

        def process(delivery: Delivery, columns: dict[str, Column]) -> dict[str, Column]:
            return {VALUES: np.zeros(len(columns["tokens"]), np.float32), CRITIC_STATE: {"step": 0, "metrics": {}}}

        return process, 1


async def run_critic() -> None:
    async with open_context(parse_settings(CRITIC, sys.argv[3:])) as context:
        await run_replica(Critic(context), context)


def main() -> None:
    role = sys.argv[2]
    if role == "trainer":
        from tests.integration.peers.trainer import TrainerDouble

        class Trainer(TrainerDouble):
            async def load(self, deliveries: list[Any], names: list[str]) -> list[Any]:
                while is_to("stuck"):
                    await asyncio.sleep(0.05)
                return await super().load(deliveries, names)

            async def SaveCheckpoint(self, request, context):
                self.calls.note("SaveCheckpoint")
                return trainer_pb2.TrainerSaveCheckpointResponse(path="checkpoint", weights=self.weights)

        asyncio.run(run_double(role, Trainer, trainer_pb2_grpc.add_TrainerServicer_to_server))
    elif role == CRITIC:
        asyncio.run(run_critic())
    elif role != "rollout":  # the real one
        module = f"services.{role}"
        sys.argv = [module, *sys.argv[3:]]
        runpy.run_module(module, run_name="__main__")
    else:
        from tests.integration.peers.rollout import RolloutDouble

        class Rollout(RolloutDouble):
            async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
                if is_to("invalid"):
                    raise InvalidArgument("rollout.sglang contradicts itself")
                await super().start_run(config, assignment)

            def generate_group(self, delivery: Any, columns: dict[str, Any]) -> dict[str, Any]:
                while is_to("stuck"):
                    time.sleep(0.05)
                return super().generate_group(delivery, columns)

            async def ReceiveWeights(self, request, context):
                if is_to("wrong"):
                    raise Aborted("told to fail")
                return await super().ReceiveWeights(request, context)

        asyncio.run(run_double(role, Rollout, rollout_pb2_grpc.add_RolloutServicer_to_server))


if __name__ == "__main__":
    if is_to("fail"):
        sys.exit("told to fail")
    main()
