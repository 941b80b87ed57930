"""A real SGLang server on the CPU, and the trainer's side of its weight groups."""

import base64
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from relaxd.weights.group import host_store
from relaxd.weights.manifest import TensorSpec, pack, plan_buckets, to_proto
from relaxd.weights.stock_group import StockWeightGroup

START_SECONDS = 120.0
KEY = "a-secret"
CPU_FLAGS = [
    "--device=cpu", "--dtype=float32", "--attention-backend=torch_native", "--sampling-backend=pytorch",
    "--grammar-backend=none", "--disable-overlap-schedule", "--max-total-tokens=16384", "--mem-fraction-static=0.3",
    "--max-running-requests=32", "--chunked-prefill-size=-1", "--skip-server-warmup", "--log-level=warning",
    "--incremental-streaming-output", "--skip-tokenizer-init",
]  # fmt: skip


class Server:
    """`python -m sglang.launch_server`; it may be killed and started again at the same address."""

    def __init__(self, python: str, model: Path, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            python, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--api-key", KEY, *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(self._command, env=os.environ | environment, start_new_session=True)

    def wait_until_up(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        request = urllib.request.Request(self.url + "/model_info", headers={"Authorization": f"Bearer {KEY}"})
        while True:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
            assert time.monotonic() < deadline, f"the server did not come up within {START_SECONDS} s"
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.2)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


class Trainer:
    """Rank 0 of weight groups with one server; its broadcasts run in a thread."""

    def __init__(self, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
        self.tensors = tensors
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        self.buckets = plan_buckets(specs, bucket_bytes, source_rank=0)
        self.manifest = to_proto(self.buckets)
        self.group: StockWeightGroup | None = None
        self._store: dist.TCPStore = host_store()

    def member(self, name: str) -> dict[str, Any]:
        """What the engine is told."""
        return {
            "name": name,
            "transport": "gloo",
            "store_host": "127.0.0.1",
            "store_port": self._store.port,
            "rank": 1,
            "world_size": 2,
            "manifest": base64.b64encode(self.manifest.SerializeToString()).decode(),
        }

    def connect(self, name: str, timeout: float = 20.0) -> None:
        self.group = StockWeightGroup("gloo", "127.0.0.1", self._store.port, name, 0, 2)
        self.group.connect(timeout)

    def broadcast(self, tensors: dict[str, torch.Tensor], *, buckets: int | None = None, timeout: float = 20.0) -> None:
        """Send some tensors in the place of one's own, or only the first buckets."""
        assert self.group is not None
        merged = self.tensors | tensors
        for bucket in self.buckets[:buckets]:
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            self.group.broadcast(pack(bucket, merged, buffer), 0, timeout)


class Thread(threading.Thread):
    """A thread whose exception its join raises."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def result(self, timeout: float = 30.0) -> None:
        self.join(timeout)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
