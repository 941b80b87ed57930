"""Plays one group through processes of every role: `python group_main.py ROLE [CARRIER...]` prints its carrier."""

import asyncio
import contextlib
import json
import sys

import grpc

from relaxd import telemetry
from relaxd.rpc.client import channel
from relaxd.rpc.errors import NotFound
from relaxd.rpc.server import start_server
from relaxd.v1 import reward_pb2, reward_pb2_grpc


class Reward(reward_pb2_grpc.RewardServicer):
    async def Score(self, request, context):
        if request.reward == "unknown":
            raise NotFound("no such reward")
        return reward_pb2.ScoreResponse()

    async def ListRewards(self, request, context):
        return reward_pb2.ListRewardsResponse()


async def traced_calls() -> None:
    add = reward_pb2_grpc.add_RewardServicer_to_server
    server = await start_server([(add, Reward(), "relaxd.v1.Reward")], host="127.0.0.1")
    async with channel(f"127.0.0.1:{server.port}") as to:
        stub = reward_pb2_grpc.RewardStub(to)
        await stub.ListRewards(reward_pb2.ListRewardsRequest())  # outside of any trace: begins none
        with telemetry.root_span("evaluate"):
            await stub.Score(reward_pb2.ScoreRequest())
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Score(reward_pb2.ScoreRequest(reward="unknown"))
    await server.stop()


def main() -> None:
    role, *words = sys.argv[1:]
    carrier = json.loads(words[0]) if words else {}
    telemetry.setup(role, f"{role}-1")
    match role:
        case "coordinator":
            with telemetry.publish_span("g1") as published:
                print(json.dumps(published))
            asyncio.run(traced_calls())
            telemetry.record("queue.waiting", 3, {"relaxd.stage": "rollout"})
        case "rollout":
            span = telemetry.open_stage_span("rollout", carrier, waited_seconds=0.5)
            span.end()
        case "reward":
            with telemetry.stage_span("reward", carrier, waited_seconds=0.25, attributes={"samples": 8}):
                telemetry.record("queue.wait_seconds", 0.25, {"relaxd.stage": "reward"})
        case "trainer":
            with (
                telemetry.root_span("step") as step,
                telemetry.stage_span("train", carrier, links=[telemetry.inject(step)]),
            ):
                pass
            telemetry.record_step("run", 7, {"loss": 0.5, "reward_own": 1.0, "kl": float("nan")})
    telemetry.shutdown()


if __name__ == "__main__":
    main()
