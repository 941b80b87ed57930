"""A rollout engine asked from a test, without a service. Its event loop runs in a thread of its own."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel

from relaxd.config import RolloutConfig
from relaxd.media.prompt_media import NO_MEDIA, PromptMedia
from relaxd.process.child import ChildExit
from relaxd.v1 import replica_pb2, rollout_pb2, weights_pb2
from services.rollout.engines.request_types import Output, Sampling, Version
from services.rollout.service.child_engine import ChildEngine
from tests.kit.waiting import eventually

PATIENCE = 120.0
_NUMBERS = itertools.count()


@dataclass
class Answer:
    """One sample, put together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    likeliest: list[list[int]] = field(default_factory=list)
    parts: int = 0
    last: Output | None = None

    def add(self, output: Output) -> None:
        assert self.last is None, "an output after the last one"
        self.tokens += map(int, output.tokens)
        self.logprobs += map(float, output.logprobs)
        self.versions += map(int, output.versions)
        self.likeliest += [list(map(int, ids)) for ids in output.likeliest]
        self.parts += 1
        if output.finish_reason is not None:
            self.last = output

    @property
    def finish(self) -> str:
        return self.last.finish_reason or "" if self.last else ""

    @property
    def spans_weight_update(self) -> bool:
        return self.last is not None and self.last.spans_weight_update


class Asked:
    """A request under way. `begun` is set with its first output."""

    def __init__(self, n: int) -> None:
        self.request_id = f"asked-{next(_NUMBERS)}"
        self.answers = [Answer() for _ in range(n)]
        self.begun = asyncio.Event()
        self.task: asyncio.Task[None]


class EngineRunner:
    """An engine and its event loop."""

    def __init__(self) -> None:
        running: Future[asyncio.AbstractEventLoop] = Future()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(running)), name="engine", daemon=True)
        self._thread.start()
        self._loop = running.result()
        self.engine: ChildEngine
        self.exits: list[ChildExit] = []
        self._gone = asyncio.Event()

    def start(
        self,
        folder: Path,
        config: RolloutConfig,
        *,
        python: str = "",
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
        for_logprobs: bool = False,
    ) -> None:
        """Start the engine; raises ChildError."""
        started = ChildEngine.start(
            folder,
            config,
            environment=environment or {},
            name="test",
            log_level="info",
            python=python,
            on_exit=self._on_exit,
            on_tokens=lambda count, per_second: None,
            frozen=for_logprobs,
            for_logprobs=for_logprobs,
        )
        self.engine = self.run(started, timeout)

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = PATIENCE) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(timeout):
                return await work

        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result()

    async def _live(self, running: "Future[asyncio.AbstractEventLoop]") -> None:
        running.set_result(asyncio.get_running_loop())
        await self._closing.wait()

    def ask(
        self,
        prompt: Sequence[int],
        n: int = 1,
        *,
        stream: bool = False,
        likeliest: int = 0,
        media: PromptMedia = NO_MEDIA,
        begun: Mapping[int, tuple[int, ...]] | None = None,
        **sampling: Any,
    ) -> Asked:
        """Send a request, which goes on while something else is awaited."""

        async def send() -> Asked:
            asked = Asked(n)
            outputs = self.engine.generate(
                tuple(prompt),
                n,
                Sampling(**sampling),
                stream=stream,
                request_id=asked.request_id,
                likeliest=likeliest,
                media=media,
                begun=begun,
            )
            asked.task = asyncio.create_task(self._collect(asked, outputs))
            return asked

        asked: Asked = self.run(send())
        return asked

    def wait_begun(self, *asked: Asked) -> None:
        for each in asked:
            self.run(each.begun.wait())

    def wait(self, asked: Asked) -> list[Answer]:
        async def wait() -> list[Answer]:
            await asked.task
            return asked.answers

        answers: list[Answer] = self.run(wait())
        return answers

    def generate(self, prompt: Sequence[int], n: int = 1, **asked: Any) -> list[Answer]:
        return self.wait(self.ask(prompt, n, **asked))

    def logprobs(self, tokens: Sequence[int], start: int, top_k: int = 0) -> Any:
        """Log-probs of given tokens, ids of the likeliest and their log-probs, of an engine `for_logprobs`."""
        return self.run(self.engine.compute_logprobs(np.array(tokens), start, top_k, PATIENCE))

    def pause(self, mode: str = "in_place", lease: float = 60.0, timeout: float = 30.0) -> int:
        return int(self.run(self.engine.pause(mode, lease, timeout)))

    def resume(self) -> None:
        """End a pause, as after a synchronisation that has succeeded if there was one."""
        self.run(self.engine.resume(self.engine.weights if self.engine.unconfirmed else None))

    def join(
        self, name: str, port: int, manifest: weights_pb2.WeightManifest, *, world_size: int = 2, timeout: float = 20.0
    ) -> None:
        self.run(self.engine.join(join_request(name, port, manifest, world_size, timeout)))

    def receive(self, name: str, version: int, timeout: float = 20.0, *, checksum: bool = False) -> dict[str, int]:
        """Receive a version; returns its checksums."""
        result = self.run(self.engine.receive(receive_request(name, Version(1, version), timeout, checksum=checksum)))
        return dict(result.checksums)

    def next_version(self) -> Version:
        assert self.engine.weights is not None
        return Version(self.engine.weights.term, self.engine.weights.version + 1)

    def begin(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start something that goes on while something else is awaited."""

        async def start() -> asyncio.Task[Any]:
            return asyncio.create_task(work)

        task: asyncio.Task[Any] = self.run(start())
        return task

    def finish(self, task: "asyncio.Task[Any]") -> Any:
        async def wait() -> Any:
            return await task

        return self.run(wait())

    def wait_exit(self) -> ChildExit:
        self.run(self._gone.wait())
        return self.exits[0]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Until it holds; the engine's events are heard meanwhile."""
        self.run(eventually(condition, seconds=PATIENCE))

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.run(self.engine.stop())
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(PATIENCE)

    async def _collect(self, asked: Asked, outputs: AsyncIterator[Output]) -> None:
        async for output in outputs:
            asked.answers[output.sample].add(output)
            asked.begun.set()

    def _on_exit(self, ended: ChildExit) -> None:
        self.exits.append(ended)
        self._gone.set()


def join_request(
    name: str, port: int, manifest: weights_pb2.WeightManifest, world_size: int, timeout: float
) -> rollout_pb2.JoinWeightGroupRequest:
    """Rank 1 of a group over gloo."""
    group = weights_pb2.WeightGroup(
        name=name,
        world_size=world_size,
        store_host="127.0.0.1",
        store_port=port,
        transport="TRANSPORT_GLOO",
        timeout_seconds=timeout,
    )
    return rollout_pb2.JoinWeightGroupRequest(group=group, rank=1, manifest=manifest)


def receive_request(
    name: str, version: Version, timeout: float, *, checksum: bool = False
) -> rollout_pb2.ReceiveWeightsRequest:
    """A version that a paused engine receives in group `name`, and takes up without a resume."""
    return rollout_pb2.ReceiveWeightsRequest(
        group_name=name,
        weights=replica_pb2.WeightVersion(term=version.term, version=version.version),
        timeout_seconds=timeout,
        checksum=checksum,
    )


def reference_logprobs(
    reference: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-prob of each answer token from one forward pass of transformers over everything."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *tokens]], device=reference.device)
        logits = reference(ids).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(-1).cpu()
    return logprobs.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)


def check_likeliest(
    reference: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], likeliest: Sequence[Sequence[int]]
) -> None:
    """In each answer token's place they are the likeliest by one forward pass of transformers, the likeliest first.

    Two that are as likely as each other, but for rounding, may be in either order.
    """
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *tokens]], device=reference.device)
        logits = reference(ids).logits[0, len(prompt) - 1 : -1].double().cpu()
    said = torch.tensor(likeliest)
    assert len(said) == len(tokens)
    assert all(len(set(each)) == len(each) for each in likeliest)
    largest = logits.topk(said.shape[1]).values
    torch.testing.assert_close(logits.gather(-1, said), largest, atol=2e-5, rtol=0)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def assert_gone(processes: list[psutil.Process]) -> None:
    """Within a minute."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
