"""Reward and advantage services as real processes, and a coordinator that tells them what the test wants."""

import asyncio
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from relaxd.board import Board, Delivery, NewGroup, stages_for
from relaxd.config import RunConfig
from relaxd.media.images import NormalImage
from relaxd.media.prompt_media import to_columns, with_references
from relaxd.rpc.client import channel
from relaxd.rpc.errors import NotFound
from relaxd.rpc.server import start_server
from relaxd.v1 import coordinator_pb2, coordinator_pb2_grpc, replica_pb2
from tests.kit.ports import free_port
from tests.kit.processes import kill, python_path, start_python
from tests.kit.waiting import eventually

HERE = Path(__file__).parent
PATIENCE = 90.0
"""Longest wait for what a process has to start for, in seconds."""


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """A run's configuration with the tests' own reward."""
    values: dict[str, dict[str, Any]] = {
        "run": {"steps": 1000},
        "model": {"path": "none"},
        "data": {"source": "addition"},
        "reward": {
            "name": "bad_rewards:by_response",
            "timeout_seconds": 30.0,
            "writable": [tempfile.gettempdir()],  # rewards and tests speak through files
        },
        "trainer": {"groups_per_step": 100},
        "board": {"lease_seconds": 1.0},
    }
    for section, settings in sections.items():
        values.setdefault(section, {}).update(settings)
    return RunConfig.model_validate(values)


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Assigns one run to whoever registers, and remembers what they say."""

    def __init__(self) -> None:
        self.assignment = coordinator_pb2.Assignment()
        self.statuses: dict[str, replica_pb2.ReplicaStatus] = {}
        self.heard = asyncio.Condition()

    def assign(self, config: RunConfig, run_id: str = "run", state: int = coordinator_pb2.RUN_STATE_RUNNING) -> None:
        self.assignment = coordinator_pb2.Assignment(run_id=run_id, config_json=config.model_dump_json(), state=state)

    async def Register(self, request, context):
        self.statuses[request.registration.replica_id] = replica_pb2.ReplicaStatus()
        return coordinator_pb2.RegisterResponse(lease_seconds=1, heartbeat_seconds=0.1, assignment=self.assignment)

    async def Heartbeat(self, request, context):
        if request.replica_id not in self.statuses:
            raise NotFound(f"no replica {request.replica_id}")
        async with self.heard:
            self.statuses[request.replica_id] = request.status
            self.heard.notify_all()
        return coordinator_pb2.HeartbeatResponse(assignment=self.assignment)

    async def hears(self, replica_id: str, state: str, held_groups: int = 0) -> replica_pb2.ReplicaStatus:
        """Wait for a heartbeat with this state and at least so many held groups."""
        number = replica_pb2.ReplicaState.Value(f"REPLICA_STATE_{state}")

        def heard() -> bool:
            status = self.statuses.get(replica_id)
            return status is not None and status.state == number and status.held_groups >= held_groups

        async with asyncio.timeout(PATIENCE), self.heard:
            await self.heard.wait_for(heard)
        return self.statuses[replica_id]


class Process:
    """A service that runs."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, to: grpc.aio.Channel) -> None:
        self.process, self.log_path, self.to = process, log, to

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    async def ends(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for the end; returns the exit code."""
        return await asyncio.to_thread(self.process.wait, PATIENCE)


class Bench:
    """One run on a real board, with the stages before and after played by the test."""

    def __init__(self, folder: Path, redis_url: str, port: int, coordinator: Coordinator) -> None:
        self.folder, self.redis_url, self.port, self.coordinator = folder, redis_url, port, coordinator
        self.board: Board | None = None

    @asynccontextmanager
    async def service(self, role: str, replica_id: str, *, grace_seconds: float = 2.0) -> AsyncIterator[Process]:
        """Start a service; when the block ends, whatever is left of it is killed."""
        port = free_port()
        path = self.folder / f"{replica_id}.log"
        arguments = {
            "--coordinator": f"127.0.0.1:{self.port}",
            "--redis": self.redis_url,
            "--port": port,
            "--replica-id": replica_id,
            "--grace-seconds": grace_seconds,
        }
        words = [str(word) for pair in arguments.items() for word in pair]
        environment = {"PYTHONPATH": python_path(HERE)}
        process = start_python("-m", f"services.{role}", *words, log=path, environment=environment)
        async with channel(f"127.0.0.1:{port}") as to:
            try:
                yield Process(process, path, to)
            finally:
                kill(process)

    def start_run(self, config: RunConfig) -> Board:
        """Create the run on the board and assign it to the services."""
        self.board = Board(self.redis_url, "run", stages_for(config), config.board)
        self.board.create(term=1, groups_per_step=config.trainer.groups_per_step, steps=config.run.steps)
        self.board.set_gate(term=1, oldest_version=0, open=True)
        self.coordinator.assign(config)
        return self.board

    def generate(self, *groups: Sequence[str], images: Sequence[NormalImage] = ()) -> list[str]:
        """Publish a group for each list of responses and commit these as rollout does; returns the groups' ids.

        Sample i of a group has i + 1 tokens. Each prompt has `images`.
        """
        assert self.board
        records, contents = to_columns(images)
        media = {"prompt_media": records, "media_contents": contents} if images else {}
        asked = [{"role": "user", "content": [{"type": "image"} for _ in images]}]
        messages = {"messages": with_references(asked, images)} if images else {}
        first = self.board.counts().published
        published = [
            NewGroup(
                f"g{first + number}",
                {
                    "prompt_tokens": np.arange(3, dtype=np.int32),
                    "prompt": {"text": "1+1?", "answer": "2", "metadata": {}, "index": number, **messages},
                    **media,
                },
            )
            for number in range(len(groups))
        ]
        ids = self.board.publish(term=1, groups=published)
        by_id = dict(zip(ids, groups, strict=True))
        taken = self.board.take("rollout", "test", count=len(groups), block_seconds=5.0)
        self.board.commit([(delivery, _rollout_columns(by_id[delivery.group_id])) for delivery in taken])
        return ids

    async def trained(self, count: int, seconds: float = PATIENCE) -> dict[str, dict[str, Any]]:
        """Take `count` groups as the trainer does; returns their columns by id."""
        assert self.board
        found: dict[str, dict[str, Any]] = {}
        async with asyncio.timeout(seconds):
            while len(found) < count:
                deliveries: list[Delivery] = await asyncio.to_thread(
                    lambda: self.board.take("train", "test", count=count, block_seconds=0.2)
                )
                columns = self.board.load(deliveries, ("reward", "reward_parts", "advantages"))
                found |= {d.group_id: c for d, c in zip(deliveries, columns, strict=True) if c is not None}
        return found

    async def dropped(self, count: int, seconds: float = PATIENCE) -> dict[str, str]:
        """Wait until `count` groups are dropped; returns the reason of each."""
        assert self.board
        await eventually(lambda: self.board.counts().dropped >= count, f"{count} dropped groups", seconds)
        return {group.group_id: group.reason for group in self.board.dropped()}


@asynccontextmanager
async def bench(folder: Path, redis_url: str) -> AsyncIterator[Bench]:
    """A bench with its coordinator listening."""
    coordinator = Coordinator()
    add = coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    async with AsyncExitStack() as stack:
        server = await start_server([(add, coordinator, "relaxd.v1.Coordinator")])
        stack.push_async_callback(server.stop)
        made = Bench(folder, redis_url, server.port, coordinator)
        yield made
        if made.board:
            made.board.counts().check()
            made.board.close()


def _rollout_columns(responses: Sequence[str]) -> dict[str, Any]:
    lengths = np.arange(1, len(responses) + 1, dtype=np.int32)
    tokens = int(lengths.sum())
    return {
        "tokens": np.arange(tokens, dtype=np.int32),
        "lengths": lengths,
        "loss_mask": np.ones(tokens, dtype=np.uint8),
        "rollout_logprobs": np.full(tokens, -1.0, dtype=np.float32),
        "versions": np.zeros(tokens, dtype=np.int64),
        "finish": ["stop"] * len(responses),
        "text": list(responses),
        "sample_of_sequence": np.arange(len(responses), dtype=np.int32),
        "shares_prompt": np.ones(len(responses), dtype=np.uint8),
        "spans_weight_update": np.zeros(len(responses), dtype=np.uint8),
    }
