"""The rollout service's double."""

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from relaxd.board import Board, Delivery, StageWorker, stages_for
from relaxd.config import RunConfig
from relaxd.models.folders import resolve_model
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus
from relaxd.roles import ROLLOUT
from relaxd.rpc.errors import Aborted, DeadlineExceeded, FailedPrecondition
from relaxd.v1 import coordinator_pb2, rollout_pb2, rollout_pb2_grpc
from relaxd.v1.replica_pb2 import REPLICA_STATE_QUARANTINED, WeightVersion
from tests.integration.peers.faults import Calls, SyncIds, misbehave
from tests.integration.peers.meeting import CHECKSUM, CHUNK, CHUNKS

ANSWER_TOKENS = 4
GENERATE_SECONDS = float(os.environ.get("PEER_GENERATE_SECONDS", "0"))
CONCURRENCY = int(os.environ.get("PEER_CONCURRENCY", "4"))
HOLD = Path(os.environ["PEER_HOLD"]) if "PEER_HOLD" in os.environ else None


class RolloutDouble(ReplicaService, rollout_pb2_grpc.RolloutServicer):
    """Answers sums: the higher the version, the more of them right."""

    role = ROLLOUT

    def __init__(self, context: ReplicaContext) -> None:
        self.context = context
        self.settings = context.settings
        self.calls, self.sync_ids = Calls(), SyncIds()
        self.weights: WeightVersion | None = None
        self.worker: StageWorker | None = None
        self.connections: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.touched = self.quarantined = self.unconfirmed = self.run_paused = False
        self.paused_by = 0
        self.generated: list[int] = []

    async def start_run(self, config: RunConfig, assignment: coordinator_pb2.Assignment) -> None:
        self.config, self.run_paused = config, False
        self.tokenizer = Tokenizer.from_file(str(resolve_model(config.model.path) / "tokenizer.json"))
        self.board = Board(self.settings.redis, assignment.run_id, stages_for(config), config.board)
        self.worker = StageWorker(
            self.board,
            "rollout",
            self.settings.replica_id,
            self.generate_group,
            concurrency=CONCURRENCY,
            on_failure=self.context.give_up,
        )
        self.worker.pause()
        self.worker.start()

    async def stop_run(self) -> None:
        if self.worker:
            await asyncio.to_thread(self.worker.stop)
        self.worker = self.weights = None

    async def drain(self, seconds: float) -> int:
        return await asyncio.to_thread(self.worker.drain, seconds) if self.worker else 0

    async def pause_run(self) -> None:
        self.run_paused = True
        self.follow()

    async def resume_run(self) -> None:
        self.run_paused = False
        self.follow()

    def follow(self) -> None:
        able = self.weights is not None and not (self.run_paused or self.paused_by or self.quarantined)
        if self.worker:
            (self.worker.resume if able else self.worker.pause)()

    def status(self) -> ServiceStatus:
        return ServiceStatus(
            held_groups=self.worker.held if self.worker else 0,
            done_groups=self.worker.done if self.worker else 0,
            progress=self.worker.done if self.worker else 0,
            state=REPLICA_STATE_QUARANTINED if self.quarantined else None,
            weights=None if self.quarantined or self.unconfirmed else self.weights,
        )

    def answer(self, prompt: str, sample: int, version: int) -> str:
        a, b = (int(number) for number in re.findall(r"\d+", prompt)[:2])
        right = (a * 31 + b * 17 + sample * 7) % 10 < 2 + 2 * version
        return str(a + b) if right else f"about {a + b + 1}"

    def generate_group(self, delivery: Delivery, columns: dict[str, Any]) -> dict[str, Any]:
        version = int(self.weights.version)
        self.board.begin(delivery, version)
        self.calls.note("generate", version=version)
        time.sleep(GENERATE_SECONDS)
        while HOLD and HOLD.exists():
            time.sleep(0.02)
        n = self.config.rollout.samples_per_prompt
        prompt = self.tokenizer.decode([int(token) for token in columns["prompt_tokens"]])
        total = n * ANSWER_TOKENS
        return {
            "tokens": np.arange(total, dtype=np.int32),
            "lengths": np.full(n, ANSWER_TOKENS, dtype=np.int32),
            "loss_mask": np.ones(total, dtype=np.uint8),
            "rollout_logprobs": np.full(total, -1.0, dtype=np.float32),
            "versions": np.full(total, version, dtype=np.int64),
            "finish": ["length" if self.config.rollout.max_new_tokens <= ANSWER_TOKENS else "stop"] * n,
            "text": [self.answer(prompt, sample, version) for sample in range(n)],
            "sample_of_sequence": np.arange(n, dtype=np.int32),
            "shares_prompt": np.ones(n, dtype=np.uint8),
            "spans_weight_update": np.zeros(n, dtype=np.uint8),
        }

    async def Generate(self, request, context):
        prompt = self.tokenizer.decode(list(request.prompt_tokens))
        self.calls.note("Generate", version=self.weights.version, greedy=request.sampling.temperature == 0)
        text = self.answer(prompt, 0, self.weights.version)
        if request.final_only:
            yield rollout_pb2.GenerateResponse(finish_reason="FINISH_REASON_STOP", text=text, token_count=3)
            return
        yield rollout_pb2.GenerateResponse(tokens=[1, 2], logprobs=[0, 0], versions=[self.weights.version] * 2)
        yield rollout_pb2.GenerateResponse(
            tokens=[3], logprobs=[0], versions=[self.weights.version], finish_reason="FINISH_REASON_STOP", text=text
        )

    async def PauseGeneration(self, request, context):
        self.sync_ids.check(request.sync_id)
        await misbehave(self.calls.note("PauseGeneration", sync_id=request.sync_id, lease=request.lease_seconds))
        self.paused_by = request.sync_id
        self.follow()
        asyncio.get_running_loop().call_later(request.lease_seconds, self.lease_over, request.sync_id)
        return rollout_pb2.PauseGenerationResponse()

    def lease_over(self, sync_id: int) -> None:
        if self.paused_by == sync_id:
            self.paused_by, self.quarantined = 0, self.touched or self.unconfirmed
            self.follow()

    async def ResumeGeneration(self, request, context):
        self.sync_ids.check(request.sync_id)
        await misbehave(self.calls.note("ResumeGeneration", sync_id=request.sync_id))
        named = request.weights if request.HasField("weights") else None
        if self.quarantined or (self.unconfirmed and named != self.weights):
            raise FailedPrecondition("quarantined, or has received weights that aren't named")
        self.paused_by, self.unconfirmed = 0, False
        self.follow()
        return rollout_pb2.ResumeGenerationResponse(weights=self.weights)

    async def JoinWeightGroup(self, request, context):
        self.sync_ids.check(request.sync_id)
        group = request.group
        await misbehave(
            self.calls.note("JoinWeightGroup", sync_id=request.sync_id, group=group.name, rank=request.rank)
        )
        try:
            async with asyncio.timeout(group.timeout_seconds):
                reader, writer = await asyncio.open_connection(group.store_host, group.store_port)
                self.connections[group.name] = (reader, writer)
                writer.write(json.dumps({"group": group.name, "rank": request.rank}).encode() + b"\n")
                if await reader.readline() != b"go\n":
                    raise Aborted("the group was given up")
        except TimeoutError as error:
            raise DeadlineExceeded("not connected in time") from error
        return rollout_pb2.JoinWeightGroupResponse()

    async def ReceiveWeights(self, request, context):
        self.sync_ids.check(request.sync_id)
        if request.HasField("pause"):
            await self.PauseGeneration(request.pause, context)
        fault = self.calls.note(
            "ReceiveWeights",
            sync_id=request.sync_id,
            group=request.group_name,
            version=request.weights.version,
            checksum=request.checksum,
        )
        if request.group_name not in self.connections:
            raise FailedPrecondition(f"no group {request.group_name}")
        reader, writer = self.connections[request.group_name]
        try:
            async with asyncio.timeout(request.timeout_seconds):
                for chunk in range(CHUNKS):
                    await reader.readexactly(CHUNK)
                    self.touched = True
                    if chunk == 2:
                        await misbehave(fault)
                writer.write(b"k")
        except TimeoutError as error:
            raise DeadlineExceeded("the broadcast took too long") from error
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise Aborted(f"a member has left: {error}") from error
        self.touched = self.quarantined = False
        self.weights = WeightVersion(term=request.weights.term, version=request.weights.version)
        self.unconfirmed = not request.resume
        if request.resume:
            await self.ResumeGeneration(rollout_pb2.ResumeGenerationRequest(sync_id=request.sync_id), context)
        checksums = {"w": CHECKSUM if fault != "wrong" else 0} if request.checksum else {}
        return rollout_pb2.ReceiveWeightsResponse(checksums=checksums)

    async def LeaveWeightGroup(self, request, context):
        self.sync_ids.check(request.sync_id)
        self.calls.note("LeaveWeightGroup", sync_id=request.sync_id, group=request.group_name)
        if request.group_name in self.connections:
            self.connections.pop(request.group_name)[1].close()
        self.quarantined = self.quarantined or self.touched or self.unconfirmed
        self.touched = False
        self.follow()
        return rollout_pb2.LeaveWeightGroupResponse(quarantined=self.quarantined)
