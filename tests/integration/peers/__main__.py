"""Doubles of the rollout and trainer services: real processes, real gRPC, a real board, but no model.

`python -m tests.integration.peers rollout|trainer` takes the flags of a service. They join, "broadcast" over sockets
with a collective's manners (a member that dies breaks it for all, one that stalls holds up all, leaving aborts it),
and die, hang or fail on command. Environment:

PEER_LOG     file to which every call is appended, as JSON lines
PEER_FAULTS  {"ReceiveWeights": {"2": "die"}}: what happens in the n-th call (see faults.py)
PEER_STEP_SECONDS, PEER_BROADCAST_SECONDS, PEER_GENERATE_SECONDS: how long a step, a broadcast, a group's samples take
PEER_HOLD    file; no group's samples are done while it is there
"""

import asyncio
import sys

from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaService, open_context
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import rollout_pb2_grpc, trainer_pb2_grpc
from tests.integration.peers.rollout import RolloutDouble
from tests.integration.peers.trainer import TrainerDouble


async def main() -> None:
    role = sys.argv[1]
    async with open_context(parse_settings(role, sys.argv[2:])) as context:
        double: ReplicaService
        if role == "trainer":
            double = TrainerDouble(context)
            service = (trainer_pb2_grpc.add_TrainerServicer_to_server, double, "relaxd.v1.Trainer")
        else:
            double = RolloutDouble(context)
            service = (rollout_pb2_grpc.add_RolloutServicer_to_server, double, "relaxd.v1.Rollout")
        await run_replica(double, context, [service])


if __name__ == "__main__":
    asyncio.run(main())
