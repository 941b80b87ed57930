"""Interface of an engine to the rollout service, whether it is a child process or an external server."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaxd.config import RunConfig
from relaxd.media.prompt_media import NO_MEDIA, PromptMedia
from relaxd.process.gpu_lease import GpuLease
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import rollout_pb2
from relaxd.weights.receipts import Receipt, digest_of
from services.rollout.engines.request_types import (
    EngineError,
    MemoryPart,
    Output,
    PauseMode,
    Request,
    Sampling,
    Version,
    check_named,
)

DIGESTS_KEPT = 4096
"""Maximum number of versions whose digests an engine keeps. The tokens of a sample have far fewer versions."""


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """Arguments of `start_engine` in an engine's module."""

    config: RunConfig
    """The run's configuration."""
    folder: Path
    """Model folder; unused by an engine without a model."""
    settings: ServiceSettings
    """Settings of the replica's process."""
    environment: Mapping[str, str]
    """Environment variables added to the replica's for a child process: its GPUs, and NCCL settings."""
    gpu_lease: GpuLease | None
    """Lease on the engine's GPUs, if it has any."""
    set_detail: Callable[[str], None]
    """Function that sets the replica's status text while the engine starts."""
    on_exit: Callable[[str], None]
    """Called with the reason if the engine ends unexpectedly, before running requests fail."""
    on_tokens: Callable[[int, float], None]
    """Called about every second with the number of tokens since the last call, and tokens per second."""


class RolloutEngine(ABC):
    """An engine with a loaded model. Use it only in the event loop that started it."""

    name: str
    """Name of the engine in its receipts: its replica's id."""
    vocabulary: int
    """Vocabulary size; every token id is smaller."""
    context: int
    """Maximum tokens of prompt and answer together; 0 when unknown."""
    device: str
    """Device of the model: "cpu" or "cuda"."""
    weights: Version | None
    """Version of the engine's weights; None before the first commit."""
    quarantined: bool
    """True if a failed update left the model between two versions, or nobody confirmed its weights in time."""
    unconfirmed: bool
    """True from a receive without resume until a resume names the weights; meanwhile they serve nothing."""
    takes_media: bool
    """True if the engine accepts prompts with media."""
    asleep: frozenset[MemoryPart]
    """Parts of memory that the engine has freed."""
    gauges: dict[str, float]
    """Latest tokens_per_second, running_samples and waiting_samples. A child process adds engine_rss_bytes and, if it
    counts them, engine_prompted_tokens and engine_prefilled_tokens."""

    def __init__(self) -> None:
        self.name = ""
        self.weights = None
        self._digests: dict[int, str] = {}
        """Digests of the engine's newest versions, oldest first: at most DIGESTS_KEPT."""
        self.quarantined = self.unconfirmed = False
        self.takes_media = False
        self.asleep = frozenset()
        self.gauges = {}
        self._numbers = itertools.count()

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Number of tokens known to be generated since the start."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True if the process runs, or the server answers."""

    @property
    def serving(self) -> bool:
        """True if the engine generates now, or will after its pause."""
        return self.alive and self.weights is not None and not self.quarantined and not self.asleep

    def generate(
        self,
        prompt_tokens: tuple[int, ...],
        n: int,
        sampling: Sampling,
        *,
        stream: bool = False,
        report_every: int = 1,
        begun: Mapping[int, tuple[int, ...]] | None = None,
        request_id: str | None = None,
        likeliest: int = 0,
        media: PromptMedia = NO_MEDIA,
    ) -> AsyncIterator[Output]:
        """Yield the outputs of n samples until all have ended. Leaving the iteration early cancels the rest.

        See Request for `stream`, `report_every`, `begun`, `likeliest` and `media`. `request_id` is for `abort`, and
        must not be in use.

        Raises EngineError if the prompt has media and the engine takes none; RequestFailed; ChildExited if the engine
        exits; ServerGone if the server is lost.
        """
        if media and not self.takes_media:
            raise EngineError("the prompt has media, but the engine takes none")
        request_id = request_id or f"request-{next(self._numbers)}"
        request = Request(request_id, prompt_tokens, n, sampling, stream, report_every, begun or {}, likeliest, media)
        return self._with_receipts(self._generate(request))

    async def _with_receipts(self, outputs: AsyncIterator[Output]) -> AsyncIterator[Output]:
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                output.receipts = self._receipts(output.versions)
                yield output

    def _receipts(self, versions: Sequence[int]) -> list[Receipt]:
        """Return a receipt for each distinct version in `versions`."""
        written = np.unique(np.asarray(versions, dtype=np.int64)).tolist()
        return [Receipt(version, self._digests.get(version, ""), self.name) for version in written]

    def take_up(self, weights: Version, checksums: Mapping[str, int], *, resume: bool) -> None:
        """Record `weights` as the engine's current weights. `checksums`: by tensor, {} if none were computed.

        Without `resume` the weights serve nothing until a resume names them.
        """
        self.weights, self.quarantined, self.unconfirmed = weights, False, not resume
        self._digests.pop(weights.version, None)  # becomes the newest
        self._digests[weights.version] = digest_of(checksums)
        if len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    @abstractmethod
    def _generate(self, request: Request) -> AsyncIterator[Output]:
        """Yield the outputs of a request, without receipts."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End the samples of a request with the tokens reported so far."""

    @abstractmethod
    async def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause generation. Returns the number of samples held in place."""

    async def resume(self, weights: Version | None = None, digest: str = "") -> None:
        """End the pause. `weights`: the weights to serve from now on; `digest`: their recorded digest, "" if unknown.

        Raises EngineError if the engine has other weights, if it has computed another digest, or if its weights are
        unconfirmed and `weights` doesn't name them.
        """
        check_named(weights, self)
        own = self._digests.get(weights.version, "") if weights is not None else ""
        if own and digest and own != digest:
            raise EngineError(f"the digest of {weights} is {digest}, but the engine's weights have {own}")
        self.unconfirmed = False
        await self._continue(weights)

    @abstractmethod
    async def _continue(self, weights: Version | None) -> None:
        """End the pause, after the checks of `resume`."""

    @abstractmethod
    async def join(self, request: rollout_pb2.JoinWeightGroupRequest) -> None:
        """Connect to a weight group."""

    @abstractmethod
    async def receive(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        """Receive and commit one version, with the requested pause before and resume after it."""

    @abstractmethod
    async def leave(self, group_name: str) -> bool:
        """Abort and forget a weight group, and quarantine the engine if its weights are unconfirmed.

        Returns True if the engine is quarantined.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Kill the process, or leave the server in order."""
