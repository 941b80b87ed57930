"""Plays one group through processes of every role: `python group_main.py ROLE [CARRIER...]` prints its carrier."""

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
from opentelemetry import trace

from relaxd import telemetry
from relaxd.board import Delivery, DropReason, NewGroup
from relaxd.board.worker import Drop, StageWorker
from relaxd.rpc.client import channel
from relaxd.rpc.errors import NotFound
from relaxd.rpc.server import start_server
from relaxd.v1 import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tests.kit.boards import group, make_board
from tests.kit.waiting import wait_until


class Reward(reward_pb2_grpc.RewardServicer):
    def __init__(self):
        self.begun = asyncio.Event()

    async def Score(self, request, context):
        if request.reward == "unknown":
            raise NotFound("no such reward")
        if request.reward == "slow":
            self.begun.set()
            await asyncio.Event().wait()
        return reward_pb2.ScoreResponse()

    async def ListRewards(self, request, context):
        return reward_pb2.ListRewardsResponse()


class Rollout(rollout_pb2_grpc.RolloutServicer):
    async def Generate(self, request, context):
        for _ in range(request.n):
            yield rollout_pb2.GenerateResponse()
        await asyncio.Event().wait()


async def abandoned_calls() -> None:
    """Calls whose caller leaves: before the answer, at its deadline, between two messages and during one."""
    reward = Reward()
    services = [
        (reward_pb2_grpc.add_RewardServicer_to_server, reward, "relaxd.v1.Reward"),
        (rollout_pb2_grpc.add_RolloutServicer_to_server, Rollout(), "relaxd.v1.Rollout"),
    ]
    server = await start_server(services, host="127.0.0.1")
    async with channel(f"127.0.0.1:{server.port}") as to:
        with telemetry.root_span("leave"):
            score = reward_pb2_grpc.RewardStub(to).Score
            waiting = score(reward_pb2.ScoreRequest(reward="slow"), timeout=60)
            await reward.begun.wait()  # connected: the next one is to arrive before its deadline
            with contextlib.suppress(grpc.aio.AioRpcError):
                await score(reward_pb2.ScoreRequest(reward="slow"), timeout=1.0)
            waiting.cancel()
            for messages in (1, 1_000_000):
                stream = rollout_pb2_grpc.RolloutStub(to).Generate(rollout_pb2.GenerateRequest(n=messages), timeout=60)
                await stream.read()
                await asyncio.sleep(0.1)  # until nothing more is read: a million messages are not
                stream.cancel()
            await asyncio.sleep(0.3)
    await server.stop()


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


def failing_stage(redis_url: str) -> None:
    """A stage that fails on a group once, and then drops it."""

    def process(delivery: Delivery, columns: Mapping[str, object]) -> Drop:
        if delivery.attempt == 1:
            raise ValueError("broken")
        return Drop(DropReason.REWARD_FAILED)

    board = make_board(redis_url)
    with telemetry.create_span("g1", "rollout") as carrier:
        board.publish(term=1, groups=[NewGroup("g1", group("g1").columns, carrier, worst_bytes=1000)])
    worker = StageWorker(board, "rollout", "rollout-1", process, concurrency=1)
    worker.start()
    wait_until(lambda: worker.done == 1, "the group is dropped")
    worker.stop()


def export_in_vain() -> None:
    """Export several times to a collector that is away."""
    for _ in range(3):
        with telemetry.root_span("step"):
            telemetry.record("queue.waiting", 3, {"relaxd.stage": "rollout"})
        telemetry.flush()


def main() -> None:
    role, *words = sys.argv[1:]
    carrier = json.loads(words[0]) if words and role != "stage" else {}
    if role in ("away", "stage"):
        telemetry.setup_logging(f"{role}-1", "info")
    if role == "away":
        vars(sys.modules["relaxd.telemetry.setup"])["EXPORT_SECONDS"] = 0.1
    telemetry.setup(role, f"{role}-1")
    if folder := os.environ.get("RUN_FOLDER"):
        telemetry.write_traces(Path(folder))
    match role:
        case "coordinator":
            with telemetry.create_span("g1", "rollout") as published:
                print(json.dumps(published))
            asyncio.run(traced_calls())
            telemetry.record("queue.waiting", 3, {"relaxd.stage": "rollout"})
        case "stage":
            failing_stage(words[0])
        case "abandoned":
            telemetry.setup_logging("abandoned-1", "info")
            asyncio.run(abandoned_calls())
        case "away":
            export_in_vain()
        case "rollout":
            span = telemetry.open_stage_span("rollout", "g1", carrier, waited_seconds=0.5)
            span.end()
        case "reward":
            asked_at = time.time_ns()
            telemetry.record_batch("receive", "receive", "reward", [carrier, {}], asked_at)
            attributes = {"samples": 8}
            span = telemetry.open_stage_span("reward", "g1", carrier, waited_seconds=0.25, attributes=attributes)
            telemetry.record("queue.wait_seconds", 0.25, {"relaxd.stage": "reward"}, span)
            with trace.use_span(span, end_on_exit=True):
                logging.getLogger("relaxd.test").warning("scoring %d samples", 8)
            with telemetry.BatchSpan("commit", "settle", "reward", [carrier]):
                pass
        case "trainer":
            with telemetry.root_span("step", attributes={"relaxd.step": 4}) as step:
                telemetry.open_stage_span("train", "g1", carrier, links=[telemetry.inject(step)]).end()
            telemetry.record_step("run", 7, {"loss": 0.5, "reward_own": 1.0, "kl": float("nan")})
    telemetry.shutdown()


if __name__ == "__main__":
    main()
