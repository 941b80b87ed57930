"""Engines whose replies a test writes, behind real gRPC servers, with a coordinator that tells of them."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

from relaxd.rpc.client import MAX_MESSAGE_BYTES, channel
from relaxd.rpc.errors import InvalidArgument, ResourceExhausted, Unavailable
from relaxd.rpc.server import RunningServer, start_server
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import coordinator_pb2, coordinator_pb2_grpc, replica_pb2, rollout_pb2, rollout_pb2_grpc, sample_pb2
from services.agent.engines import RunEngines
from tests.kit.models import SPECIAL_TOKENS, byte_tokenizer
from tests.kit.replicas import watch_replicas

RUN_ID = "run-1"
STOP = SPECIAL_TOKENS.index("<|im_end|>")


def encode(text: str) -> list[int]:
    """Return the tokens of a plain text."""
    return list(byte_tokenizer().encode(text, add_special_tokens=False, split_special_tokens=True))


@dataclass
class Act:
    """Answer of an engine to one request."""

    what: Literal["answer", "die", "drain", "abort", "full", "crash"] = "answer"
    """answer it; die, drain or abort it after some tokens; be full; or fail it (which others don't make good)."""
    tokens: int = 0
    """Tokens until then."""
    retry_seconds: float = 0.05


class ScriptedEngine(rollout_pb2_grpc.RolloutServicer):
    """One engine of a fleet."""

    def __init__(self, fleet: "Fleet", name: str, version: int) -> None:
        self._fleet = fleet
        self.name = name
        self.version = version
        self.port = 0
        self.ready = True
        self.asleep = False
        """True while the trainer of a colocated run has its GPU, which the coordinator says, too."""

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Stream the reply of the fleet's script to this prompt, a token a message."""
        self._fleet.requests.append(request)
        self._fleet.asked.append(self.name)
        if self.asleep:
            raise Unavailable("the engine has no weights to serve", retry_seconds=0.05)
        act = self._fleet.acts.pop(0) if self._fleet.acts else Act()
        if act.what == "full":
            raise ResourceExhausted("full", retry_seconds=act.retry_seconds)
        if act.what == "crash":
            raise InvalidArgument("prompt_tokens is of another model")
        whole = self._fleet.reply_to(request)
        for place, token in enumerate(whole[len(request.begun_tokens) :]):
            if act.what != "answer" and place == act.tokens:
                break
            yield rollout_pb2.GenerateResponse(
                tokens=[token],
                logprobs=[-float(token)],
                versions=[self.version],
                receipts=[{"version": self.version, "digest": f"digest {self.version}", "engine": self.name}],
            )
        match act.what:
            case "answer":
                text = byte_tokenizer().decode(whole[:-1])
                yield rollout_pb2.GenerateResponse(finish_reason=sample_pb2.FINISH_REASON_STOP, text=text)
            case "abort":
                yield rollout_pb2.GenerateResponse(finish_reason=sample_pb2.FINISH_REASON_ABORT, text="cut")
            case "drain":
                self.ready = False
                raise Unavailable("the engine was stopped")
            case _:
                self.ready = False
                await self._fleet.kill(self)


class Fleet(coordinator_pb2_grpc.CoordinatorServicer):
    """A coordinator and its engines. A prompt that no engine has seen gets the next of `texts`."""

    def __init__(self, texts: Sequence[str], versions: Sequence[int]) -> None:
        self._texts: Iterator[str] = iter(texts)
        self._replies: dict[tuple[int, ...], list[int]] = {}
        self.engines = [ScriptedEngine(self, f"rollout-{place}", version) for place, version in enumerate(versions)]
        self.acts: list[Act] = []
        """Acts for the next requests, whichever engine gets them; those after them are answered."""
        self.asked: list[str] = []
        """Names of the engines that were asked, in order."""
        self.requests: list[rollout_pb2.GenerateRequest] = []
        """Their requests."""
        self.max_message_bytes = MAX_MESSAGE_BYTES
        """Maximum size of a message that the engines take."""
        self._servers: dict[str, RunningServer] = {}
        self._dying: list[asyncio.Task[None]] = []

    def reply_to(self, request: rollout_pb2.GenerateRequest) -> list[int]:
        """Return the tokens of the reply to a prompt, which begins with those that it has."""
        prompt = tuple(request.prompt_tokens)
        if prompt not in self._replies:
            self._replies[prompt] = [*encode(next(self._texts)), STOP]
        whole = self._replies[prompt]
        assert list(request.begun_tokens) == whole[: len(request.begun_tokens)]
        return whole

    async def kill(self, engine: ScriptedEngine) -> None:
        """Break off all calls of an engine, from within one, and take no more."""
        self._dying.append(asyncio.create_task(self._servers.pop(engine.name).stop(0)))
        await asyncio.Event().wait()  # until the server cancels this call

    async def WatchReplicas(
        self, request: coordinator_pb2.WatchReplicasRequest, context: Any
    ) -> AsyncIterator[coordinator_pb2.WatchReplicasResponse]:
        """Tell of the engines."""
        async for message in watch_replicas(lambda: [self._described(engine) for engine in self.engines]):
            yield message

    def _described(self, engine: ScriptedEngine) -> coordinator_pb2.CallableReplica:
        ready, draining = replica_pb2.REPLICA_STATE_READY, replica_pb2.REPLICA_STATE_DRAINING
        return coordinator_pb2.CallableReplica(
            replica_id=engine.name,
            address=f"127.0.0.1:{engine.port}",
            state=ready if engine.ready else draining,
            run_id=RUN_ID,
            detail="asleep" if engine.asleep else "",
            weights=None if engine.asleep else replica_pb2.WeightVersion(term=1, version=engine.version),
        )

    def add_replica(self, name: str, address: str, version: int) -> None:
        """Tell also of a real replica, which is served elsewhere."""
        engine = ScriptedEngine(self, name, version)
        engine.port = int(address.rpartition(":")[2])
        self.engines.append(engine)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RunEngines]:
        """Serve the coordinator and the engines, and yield a client of them."""
        add = rollout_pb2_grpc.add_RolloutServicer_to_server
        for engine in self.engines:
            self._servers[engine.name] = server = await start_server(
                [(add, engine, "relaxd.v1.Rollout")], max_message_bytes=self.max_message_bytes
            )
            engine.port = server.port
        add_coordinator = coordinator_pb2_grpc.add_CoordinatorServicer_to_server
        self._servers["coordinator"] = server = await start_server([(add_coordinator, self, "relaxd.v1.Coordinator")])
        async with channel(f"127.0.0.1:{server.port}") as to:
            stub, settings = coordinator_pb2_grpc.CoordinatorStub(to), ServiceSettings(role="agent")
            client = RunEngines(cast(Any, SimpleNamespace(coordinator=stub, settings=settings)), RUN_ID)
            try:
                yield client
            finally:
                await client.close()
                await asyncio.gather(*self._dying, *(server.stop() for server in self._servers.values()))
