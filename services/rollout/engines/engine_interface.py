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
"""Maximum number of versions for which an engine keeps digests. The tokens of one sample have far fewer versions."""


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """Arguments of the function `start_engine`, which each engine's module has."""

    config: RunConfig
    """The run's configuration."""
    folder: Path
    """Path of the model folder; unused by an engine without a model."""
    settings: ServiceSettings
    """Settings of the replica's service process."""
    environment: Mapping[str, str]
    """Environment variables for a child process, added to the replica's: its GPUs, and NCCL settings."""
    gpu_lease: GpuLease | None
    """Lease on the engine's GPUs; None if the engine has no GPUs."""
    set_detail: Callable[[str], None]
    """Function that sets the replica's status text while the engine starts."""
    on_exit: Callable[[str], None]
    """Function that gets the reason if the engine ends unexpectedly, before running requests fail."""
    on_tokens: Callable[[int, float], None]
    """Function that gets the number of tokens since the last call, and tokens per second. Called about once a
    second."""


class RolloutEngine(ABC):
    """An inference engine with a loaded model. Use it only in the event loop that started it."""

    name: str
    """Name of the engine in its receipts, which is the replica's id."""
    vocabulary: int
    """Number of token ids in the model's vocabulary; every token id is smaller."""
    context: int
    """Maximum number of tokens of prompt and answer together; 0 if unknown."""
    device: str
    """Type of the device that holds the model: "cpu" or "cuda"."""
    weights: Version | None
    """Version of the engine's weights; None before the first version is committed."""
    quarantined: bool
    """True if a failed weight update left the model between two versions, or if nobody confirmed the new weights in
    time."""
    unconfirmed: bool
    """True after weights were received without `resume`, until a resume names them. Meanwhile the engine doesn't
    generate."""
    takes_media: bool
    """True if the engine accepts prompts with media."""
    asleep: frozenset[MemoryPart]
    """Parts of the engine's memory that are freed now."""
    gauges: dict[str, float]
    """Latest values of tokens_per_second, running_samples and waiting_samples. A child process adds engine_rss_bytes
    and, if it counts them, engine_prompted_tokens and engine_prefilled_tokens."""

    def __init__(self) -> None:
        self.name = ""
        self.weights = None
        self._digests: dict[int, str] = {}
        """Digests of the engine's newest versions, by version, oldest first; at most DIGESTS_KEPT."""
        self.quarantined = self.unconfirmed = False
        self.takes_media = False
        self.asleep = frozenset()
        self.gauges = {}
        self._numbers = itertools.count()

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Number of tokens that the engine is known to have generated since its start."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True if the engine's process runs, or the external server answers."""

    @property
    def serving(self) -> bool:
        """True if the engine generates now, or will generate after its current pause."""
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
        """Generate n samples for a prompt, and yield their outputs until all samples have ended. Leaving the iteration
        early cancels the remaining samples.

        See Request for `stream`, `report_every`, `begun`, `likeliest` and `media`. `request_id` names the request for
        `abort`, and must not be in use.

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
        """Return a receipt for each distinct version in `versions`, which has one version per token."""
        written = np.unique(np.asarray(versions, dtype=np.int64)).tolist()
        return [Receipt(version, self._digests.get(version, ""), self.name) for version in written]

    def take_up(self, weights: Version, checksums: Mapping[str, int], *, resume: bool) -> None:
        """Record `weights` as the engine's current weights. `checksums`: by tensor name, {} if none were computed.

        Without `resume` the engine doesn't generate until a resume names the weights.
        """
        self.weights, self.quarantined, self.unconfirmed = weights, False, not resume
        self._digests.pop(weights.version, None)  # becomes the newest
        self._digests[weights.version] = digest_of(checksums)
        if len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    @abstractmethod
    def _generate(self, request: Request) -> AsyncIterator[Output]:
        """Generate the samples of a request, and yield their outputs without receipts."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End all samples of a request. They keep the tokens reported so far."""

    @abstractmethod
    async def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause generation. Returns the number of samples that are held in place."""

    async def resume(self, weights: Version | None = None, digest: str = "") -> None:
        """End the engine's pause. `weights`: the weights to serve from now on; `digest`: their recorded digest, "" if
        unknown.

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
        """End the engine's pause; `resume` has made its checks before."""

    @abstractmethod
    async def join(self, request: rollout_pb2.JoinWeightGroupRequest) -> None:
        """Connect the engine to a weight group."""

    @abstractmethod
    async def receive(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        """Receive and commit the weights of one version. The request may ask for a pause before and a resume
        afterwards."""

    @abstractmethod
    async def leave(self, group_name: str) -> bool:
        """Leave a weight group by aborting its transfers, and quarantine the engine if its weights are unconfirmed.

        Returns True if the engine is quarantined.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the engine: kill its child process, or disconnect from the external server in an orderly way."""
