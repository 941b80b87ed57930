"""Client of the run's engines, which gets replies by calls of Rollout.Generate."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from relaxd.media.prompt_media import NO_MEDIA, PromptMedia
from relaxd.replica.peer_replicas import AVOIDED_SECONDS, NoReplicaError, Peer, PeerReplicas
from relaxd.replica.replica_service import ReplicaContext
from relaxd.roles import ROLLOUT
from relaxd.rpc.errors import explain, is_too_large, retry_seconds
from relaxd.v1.rollout_pb2 import GenerateRequest
from relaxd.v1.rollout_pb2_grpc import RolloutStub
from relaxd.v1.sample_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, SamplingParams
from relaxd.waiting import waiting
from relaxd.weights.receipts import Receipt

WAIT_SECONDS = 0.2
"""Seconds between two attempts while no engine is available, and after an engine's pause cut off a reply."""
REPORT_TOKENS = 64
"""Minimum tokens that an engine sends per message, and roughly the maximum lost if the engine dies."""
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class RefusedPrompt(Exception):
    """The engine refused a prompt. The exception's message has the reason."""

    @property
    def is_too_long(self) -> bool:
        """True if the prompt leaves no room in the model's context."""
        return "sampling.max_new_tokens" in str(self)


class RequestTooLarge(Exception):
    """A request with its media exceeds the maximum message size. The exception's message has the sizes."""


class OutOfTime(Exception):
    """The conversation's time ended before the reply was complete."""


@dataclass
class EngineReply:
    """The model's reply to a prompt, complete or unfinished. Several engines may have generated parts of it."""

    tokens: list[int] = field(default_factory=list)
    """Token ids of the reply, including the end token."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token of the reply."""
    versions: list[int] = field(default_factory=list)
    """Weight version that generated each token of the reply."""
    text: str = ""
    """Text of the reply without the end token; empty until the reply has ended."""
    ended: bool = False
    """True if the reply is complete."""
    receipts: set[Receipt] = field(default_factory=set)
    """Receipts for the weights that generated the reply's tokens."""
    cut: bool = False
    """True if the reply was cut off at its maximum length."""


@dataclass(frozen=True)
class WantedWeights:
    """Weights that an evaluation tests, which engines must serve."""

    term: int
    """Minimum term of the trainer. A version has the same weights in all later terms."""
    version: int
    or_later: bool
    """True if versions later than this one are accepted too."""

    def served_by(self, engine: Peer[RolloutStub]) -> bool:
        """Return True if an engine serves weights that the evaluation accepts."""
        if engine.version is None or engine.term < self.term:
            return False
        return engine.version == self.version or (self.or_later and engine.version > self.version)


@dataclass
class EngineSession:
    """State of one conversation's requests.

    They go to the same engine, because it has cached the conversation's tokens.
    """

    name: str
    """Name of the conversation in traces."""
    wanted: WantedWeights | None = None
    """Weights that engines must serve; None for any weights."""
    engine: str = ""
    """Replica id of the engine that got the last request."""
    receipts: set[Receipt] = field(default_factory=set)
    """Receipts for the weights that generated the conversation's replies."""
    asked_seconds: float = 0.0
    """Seconds that the conversation spent in requests to engines, including waits for an engine."""
    waited_seconds: float = 0.0
    """Part of `asked_seconds` in which no engine was available or all were full."""


class RunEngines:
    """Client of all engines of a run. Use it in one event loop."""

    def __init__(self, context: ReplicaContext, run_id: str) -> None:
        self._peers: PeerReplicas[RolloutStub] = PeerReplicas(
            ROLLOUT,
            RolloutStub,
            context.coordinator,
            context.settings,
            run_id,
            serving=True,
        )
        self.pieces = 0
        """Number of engines' messages and of waits so far. It grows while the replica makes progress."""

    async def oldest_version(self) -> int:
        """Return the oldest weight version that an available engine serves. Waits until an engine is available."""
        await self._serving(EngineSession(""))
        return min(peer.version for peer in self._peers.ready if peer.version is not None)

    async def generate(
        self,
        session: EngineSession,
        prompt: list[int],
        sampling: SamplingParams,
        seconds: Callable[[], float],
        media: PromptMedia = NO_MEDIA,
    ) -> EngineReply:
        """Return a complete reply to a prompt.

        If the engine disappears or is paused in mode "abort", the reply continues after its tokens so far.

        Args:
            session: the conversation's session.
            prompt: token ids.
            sampling: sampling parameters.
            seconds: function that returns how many seconds the conversation may still take.
            media: the prompt's media, with their positions.

        Raises:
            RefusedPrompt: the engine refused the prompt.
            RequestTooLarge: the media are too large for a message.
            OutOfTime: no time remains.
            grpc.aio.AioRpcError: the engine failed otherwise.
        """
        begun, reply = time.monotonic(), EngineReply()
        try:
            while True:
                peer = await self._serving(session)
                left = seconds()
                if left <= 0:
                    raise OutOfTime
                request = GenerateRequest(
                    prompt_tokens=prompt,
                    n=1,
                    sampling=sampling,
                    session_id=session.name,
                    begun_tokens=reply.tokens,
                    report_every=REPORT_TOKENS,
                    media=media.to_proto(),
                    media_contents=media.contents,
                )
                try:
                    await self._ask(peer, request, left, reply)
                except grpc.aio.AioRpcError as error:
                    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                        raise OutOfTime from error
                    if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                        raise RefusedPrompt(explain(error)) from error
                    full = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                    if full and (pause := retry_seconds(error)) is not None:
                        self._peers.avoid(peer, pause, "are full")
                    elif error.code() in _AWAY:  # a sleeping engine says when to retry
                        self._peers.avoid(peer, retry_seconds(error) or AVOIDED_SECONDS)
                    elif is_too_large(error):
                        raise RequestTooLarge(
                            f"the request for the model's next message has {request.ByteSize()} bytes, "
                            f"{len(media.contents)} of them in {len(media.records)} images, videos and sounds: show "
                            f"fewer or smaller ones, because each request has all ({explain(error)})"
                        ) from error
                    else:
                        raise
                    continue
                if reply.ended:
                    session.receipts |= reply.receipts
                    return reply
                await asyncio.sleep(WAIT_SECONDS)  # brief: the next call waits for the end of the engine's pause
        finally:
            session.asked_seconds += time.monotonic() - begun

    async def close(self) -> None:
        """Close the connections to all engines."""
        await self._peers.close()

    async def _serving(self, session: EngineSession) -> Peer[RolloutStub]:
        """Return an engine that serves, preferably the session's last engine. Waits until an engine is available."""
        begun, wanted = time.monotonic(), session.wanted
        fits = wanted.served_by if wanted is not None else None
        try:
            peer = await self._peers.choose(session.engine, fits)
        except NoReplicaError as error:
            with waiting(f"an engine that serves: {error}", on=ROLLOUT) as wait:
                while True:
                    self.pieces += 1
                    await asyncio.sleep(WAIT_SECONDS)  # named: above
                    try:
                        peer = await self._peers.choose(fits=fits)
                        break
                    except NoReplicaError as again:
                        wait.reason = f"an engine that serves: {again}"
            session.waited_seconds += time.monotonic() - begun
        session.engine = peer.replica_id
        return peer

    async def _ask(self, peer: Peer[RolloutStub], request: GenerateRequest, seconds: float, reply: EngineReply) -> None:
        """Send a request to an engine, and add the tokens to a reply until it ends, a pause cuts it off, or the call
        fails."""
        with peer.called() as stub:
            async for message in stub.Generate(request, timeout=seconds):
                self.pieces += 1
                reply.tokens += message.tokens
                reply.logprobs += message.logprobs
                reply.versions += message.versions
                reply.receipts.update(map(Receipt.from_proto, message.receipts))
                if message.versions:
                    peer.version = max(message.versions[-1], peer.version or 0)
                if message.finish_reason not in (FINISH_REASON_UNSPECIFIED, FINISH_REASON_ABORT):
                    reply.text, reply.ended = message.text, True
                    reply.cut = message.finish_reason == FINISH_REASON_LENGTH
