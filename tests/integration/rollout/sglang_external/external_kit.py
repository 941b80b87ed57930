"""A real SGLang server, the trainer's side of its weight groups, and the engine between them."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from relaxd.config import RolloutConfig
from relaxd.v1 import rollout_pb2, weights_pb2
from relaxd.weights.buckets import TensorSpec, pack, plan_buckets, to_proto
from relaxd.weights.weight_group import Rendezvous, StockWeightGroup, Transport, host_store
from services.rollout.engines.request_types import Output, Sampling, Version
from services.rollout.engines.sglang_external.external_engine import ExternalEngine
from tests.kit.engines import receive_request
from tests.kit.ports import free_port
from tests.kit.processes import start_python
from tests.kit.waiting import wait_until
from tests.sglang.environment import CPU_ENVIRONMENT

PROMPT = (5, 9, 17, 200, 33)
LONG = Sampling(max_new_tokens=400, ignore_eos=True)
names = (f"group-{number}" for number in itertools.count())
START_SECONDS = 240.0
KEY = "a-secret"
CPU_FLAGS = [
    "--device=cpu", "--dtype=float32", "--attention-backend=torch_native", "--sampling-backend=pytorch",
    "--grammar-backend=none", "--disable-overlap-schedule", "--max-total-tokens=16384", "--mem-fraction-static=0.3",
    "--max-running-requests=32", "--chunked-prefill-size=-1", "--skip-server-warmup", "--log-level=warning",
    "--incremental-streaming-output", "--skip-tokenizer-init",
]  # fmt: skip


class Server:
    """`python -m sglang.launch_server`; it may be killed and started again at the same address."""

    def __init__(self, python: str, model: Path, *flags: str, environment: Mapping[str, str] = CPU_ENVIRONMENT) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._python = python
        self._words = [
            "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--api-key", KEY, *flags,
        ]  # fmt: skip
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = start_python(
            *self._words, python=self._python, environment=self._environment, start_new_session=True
        )

    def wait_until_up(self) -> None:
        assert self.process is not None
        process = self.process
        request = urllib.request.Request(self.url + "/model_info", headers={"Authorization": f"Bearer {KEY}"})

        def answers() -> bool:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            urllib.request.urlopen(request, timeout=5).close()
            return True

        forgive = (urllib.error.URLError, TimeoutError)
        wait_until(answers, "the server comes up", START_SECONDS, forgive=forgive, pause_seconds=0.2)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


class Trainer:
    """Rank 0 of weight groups with one server; its broadcasts run in a thread."""

    def __init__(self, tensors: dict[str, torch.Tensor], bucket_bytes: int, device: torch.device | None = None) -> None:
        """With a device, the groups are over nccl."""
        self.tensors = tensors
        self._device = device
        self._transport: Transport = "nccl" if device is not None else "gloo"
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        self.buckets = plan_buckets(specs, bucket_bytes, source_rank=0)
        self.manifest = to_proto(self.buckets)
        self.group: StockWeightGroup | None = None
        self._store: dist.TCPStore = host_store()

    def member(self, name: str, timeout: float) -> rollout_pb2.JoinWeightGroupRequest:
        """What the engine is told."""
        group = weights_pb2.WeightGroup(
            name=name,
            world_size=2,
            store_host="127.0.0.1",
            store_port=self._store.port,
            transport=f"TRANSPORT_{self._transport.upper()}",
            timeout_seconds=timeout,
        )
        return rollout_pb2.JoinWeightGroupRequest(group=group, rank=1, manifest=self.manifest)

    def connect(self, name: str, timeout: float = 20.0) -> None:
        self.close()
        self.group = StockWeightGroup(Rendezvous.from_proto(self.member(name, timeout).group), 0, self._device)
        self.group.connect(timeout)

    def close(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.abort()

    def broadcast(self, tensors: dict[str, torch.Tensor], *, buckets: int | None = None, timeout: float = 20.0) -> None:
        """Send some tensors in the place of one's own, or only the first buckets."""
        assert self.group is not None
        merged = self.tensors | tensors
        for bucket in self.buckets[:buckets]:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            self.group.broadcast(pack(bucket, merged, buffer), 0, timeout)


class Engine:
    """An engine, the trainer that gives it weights, and what it was told about the server's death."""

    def __init__(self, engine: ExternalEngine, trainer: Trainer, model: Path) -> None:
        self.engine = engine
        self.trainer = trainer
        self.model = model
        self.group = ""

    async def join(self) -> None:
        self.group = next(names)
        joining = asyncio.to_thread(self.trainer.connect, self.group)
        await asyncio.gather(self.engine.join(self.trainer.member(self.group, 20)), joining)

    async def transfer(self, version: int, term: int = 1) -> None:
        """Weights whose output depends on the version."""
        sending = asyncio.to_thread(self.trainer.broadcast, changes(self.trainer.tensors, version))
        receiving = self.engine.receive(receive_request(self.group, Version(term, version), 20, checksum=True))
        await asyncio.gather(receiving, sending)

    async def sync(self, version: int, mode: Any = "in_place") -> int:
        held = await self.engine.pause(mode, 30, 10)
        await self.join()
        await self.transfer(version)
        await self.engine.resume(Version(1, version))
        return held

    def reference(self, version: int) -> PreTrainedModel:
        """The model with the weights of a version."""
        reference = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        reference.load_state_dict(changes(self.trainer.tensors, version), strict=False)
        return reference

    async def generate(self, n: int = 1, sampling: Sampling = LONG, **options: Any) -> list[list[Output]]:
        samples: list[list[Output]] = [[] for _ in range(n)]
        async for output in self.engine.generate(PROMPT, n, sampling, **options):
            samples[output.sample].append(output)
        return samples


def changes(tensors: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """What is different in a version: all keys and values, and all logits."""
    changed = {}
    for name in ("model.layers.0.input_layernorm.weight", "model.norm.weight"):
        norm = tensors[name]
        wave = torch.cos(torch.arange(len(norm), device=norm.device) * float(version))
        changed[name] = (norm * (1 + version) + 0.5 * wave).to(norm.dtype)
    return changed


def logprobs(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


async def connect(server: Server, model: Path, exits: list[str] | None = None, **config: Any) -> ExternalEngine:
    return await ExternalEngine.start(
        server.url,
        KEY,
        model,
        RolloutConfig(engine="sglang_external", **config),
        on_exit=(exits if exits is not None else []).append,
        on_tokens=lambda count, per_second: None,
    )
