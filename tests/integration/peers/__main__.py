"""Doubles of the rollout and trainer services: real processes, real gRPC, a real board, but no model.

`python -m tests.integration.peers rollout|trainer` takes the flags of a service. They join, "broadcast" over sockets
with a collective's manners (a member that dies breaks it for all, one that stalls holds up all, leaving aborts it),
and die, hang or fail on command. Environment:

PEER_LOG     file to which every call is appended, as JSON lines
PEER_FAULTS  {"ReceiveWeights": {"2": "die"}}: what happens in the n-th call (see faults.py)
PEER_STEP_SECONDS, PEER_BROADCAST_SECONDS, PEER_GENERATE_SECONDS: how long a step, a broadcast, a group's samples take
"""

import asyncio
import sys

from relaxd.replica.replica import ReplicaService, run_replica
from relaxd.rpc.settings import parse_settings
from relaxd.v1 import rollout_pb2_grpc, trainer_pb2_grpc
from tests.integration.peers.rollout import RolloutDouble
from tests.integration.peers.trainer import TrainerDouble


def main() -> None:
    role = sys.argv[1]
    settings = parse_settings(role, sys.argv[2:])
    double: ReplicaService
    if role == "trainer":
        double = TrainerDouble(settings)
        service = (trainer_pb2_grpc.add_TrainerServicer_to_server, double, "relaxd.v1.Trainer")
    else:
        double = RolloutDouble(settings)
        service = (rollout_pb2_grpc.add_RolloutServicer_to_server, double, "relaxd.v1.Rollout")
    asyncio.run(run_replica(double, settings, [service]))


if __name__ == "__main__":
    main()
