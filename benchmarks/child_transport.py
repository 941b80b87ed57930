"""Calls of a child process: gRPC on a Unix socket (relaxd.process) compared with JSON in frames, as it was before.

    python -m benchmarks.child_transport

In the child a thread stands for the engine: it answers every request that waits, with a whole sample, or token by
token in lockstep. Measured in the parent: latency of a control call, idle and while another thread of the child is
busy in Python; whole samples and streamed tokens per second, until they are numpy arrays.
"""

import argparse
import asyncio
import base64
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.reporting import report
from relaxd.config import RolloutConfig
from relaxd.engines import ENGINES
from relaxd.process.child import LIFELINE_VARIABLE, Child
from relaxd.v1 import engine_pb2, rollout_pb2
from services.rollout.engines.engine_process import EngineProcess
from services.rollout.engines.generation_gate import GenerationGate
from services.rollout.engines.request_types import Output, Request, Sampling
from services.rollout.service.child_engine import ChildEngine

TOKENS = 256
TEXT = "x" * 600
PAUSE_SECONDS = 0.01
"""Pause between two control calls. Without it the child's busy thread might not get the GIL back in between."""
HEADER = struct.Struct("<I")
MODULE = "benchmarks.child_transport"
BUSY = "RELAXD_BENCHMARK_BUSY"
"""Environment variable of the gRPC child: whether a thread is busy."""
PROMPT = tuple(range(32))

Part = tuple[Any, list[int], list[float], list[int], bool]
"""New tokens, log-probs and versions of a request's sample, and whether it has ended."""
Ask = Callable[[bool], AsyncIterator[np.ndarray]]


class Engine(threading.Thread):
    """Answers requests."""

    def __init__(self, deliver: Callable[[list[Part]], None]) -> None:
        super().__init__(daemon=True)
        self.gate = GenerationGate()
        self._deliver = deliver
        self._requests: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()
        self.start()

    def ask(self, number: Any, stream: bool) -> None:
        self._requests.put((number, stream))

    def submit(self, request: Request) -> None:
        self.ask(request.request_id, request.stream)

    def stats(self) -> dict[str, int]:
        return {"running_samples": 0, "waiting_samples": 0, "tokens_generated": 0}

    def run(self) -> None:
        running: dict[Any, int] = {}
        while True:
            parts: list[Part] = []
            while (not running and not parts) or not self._requests.empty():
                number, stream = self._requests.get()
                if stream:
                    running[number] = TOKENS
                else:
                    parts.append((number, [7] * TOKENS, [-0.5] * TOKENS, [3] * TOKENS, True))
            for number in running:
                running[number] -= 1
                parts.append((number, [7], [-0.5], [3], not running[number]))
            running = {number: left for number, left in running.items() if left}
            self._deliver(parts)


class GrpcChild(EngineProcess[Any]):
    """An engine's process as it is, around the thread."""

    def load(self, folder: str, config: RolloutConfig, colocate: bool) -> engine_pb2.LoadResponse:
        self._engine = Engine(self._put)
        return engine_pb2.LoadResponse(vocabulary=256, device="cpu")

    def _put(self, parts: list[Part]) -> None:
        self.outputs.put(
            {
                number: [Output(0, tokens, logprobs, versions, "length" if ended else None, TEXT)]
                for number, tokens, logprobs, versions, ended in parts
            }
        )

    def _receive_weights(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        raise NotImplementedError("this engine has no weights")

    def _leave_group(self, name: str) -> bool:
        return False

    def _leave_groups(self) -> None: ...

    def _rss_bytes(self) -> int:
        return 0

    def _memory_in_use(self) -> int:
        return 0


class FramesChild:
    """Answers as it was before: base64 in JSON in frames, the parts of a step together."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ[LIFELINE_VARIABLE]))
        self._sending = threading.Lock()
        self._engine = Engine(self._deliver)

    def serve(self) -> None:
        reader = self._socket.makefile("rb")
        while header := reader.read(HEADER.size):
            message = json.loads(reader.read(*HEADER.unpack(header)))
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _answer(self, message: dict[str, Any]) -> None:
        if message["method"] == "generate":
            self._engine.ask(message["id"], message["params"]["stream"])
        self._send({"id": message["id"], "result": "fine"})

    def _deliver(self, parts: list[Part]) -> None:
        self._send({"parts": [[number, *map(_base64, new), ended] for number, *new, ended in parts]})

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self._socket.sendall(HEADER.pack(len(body)) + body)


class FramesParent:
    """The parent's side of it."""

    def __init__(self, child: Child) -> None:
        assert child._writer is not None
        self._writer = child._writer
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._queues: dict[int, asyncio.Queue[tuple[list[Any], bool]]] = {}
        self._next = 0

    async def read(self, reader: asyncio.StreamReader) -> None:
        while True:
            (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            message = json.loads(await reader.readexactly(length))
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message["result"])
            for number, *arrays, ended in message.get("parts", ()):
                lists = [
                    np.frombuffer(base64.b64decode(array), kind).tolist()
                    for array, kind in zip(arrays, (np.int64, np.float64, np.int64), strict=True)
                ]
                self._queues[number].put_nowait((lists, ended))

    async def request(self, method: str, **params: Any) -> int:
        self._next += 1
        number = self._next
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._queues[number] = asyncio.Queue()
        body = json.dumps({"id": number, "method": method, "params": params}).encode()
        self._writer.write(HEADER.pack(len(body)) + body)
        await answer
        return number

    async def ask(self, stream: bool) -> AsyncIterator[np.ndarray]:
        number = await self.request("generate", prompt=PROMPT, stream=stream)
        ended = False
        while not ended:
            (tokens, logprobs, versions), ended = await self._queues[number].get()
            np.array(logprobs, np.float32)
            np.array(versions, np.int64)
            yield np.array(tokens, np.int32)
        del self._queues[number]


def _base64(values: list[Any]) -> str:
    return base64.b64encode(np.array(values).tobytes()).decode()


async def start(kind: str, busy: bool) -> tuple[Any, Callable[[], Any], Ask]:
    """Start a child. Returns it, its control call, and its generation."""
    if kind == "frames":
        child = await Child.start(MODULE, ["--child", *(["--busy"] if busy else [])])
        assert child._reading is not None
        child._reading.cancel()
        parent = FramesParent(child)
        reader = child._writer.transport.get_protocol()._stream_reader  # type: ignore[union-attr]
        child._reading = asyncio.create_task(parent.read(reader))
        return child, lambda: parent.request("status"), parent.ask
    ENGINES["transformers"] = replace(ENGINES["transformers"], process=MODULE)
    engine = await ChildEngine.start(
        Path("."),
        RolloutConfig(),
        environment={BUSY: str(int(busy))},
        name="benchmark",
        log_level="warning",
        on_exit=lambda ended: None,
        on_tokens=lambda count, per_second: None,
    )

    async def ask(stream: bool) -> AsyncIterator[np.ndarray]:
        async for part in engine.generate(PROMPT, 1, Sampling(TOKENS), stream=stream):
            yield np.asarray(part.tokens)

    return engine._child, engine.resume, ask


async def latency(control: Callable[[], Any], calls: int) -> str:
    """Return p50 / p99 in milliseconds."""
    seconds = []
    for _ in range(calls + 10):
        await asyncio.sleep(PAUSE_SECONDS)
        started = time.perf_counter()
        await control()
        seconds.append(time.perf_counter() - started)
    return " / ".join(f"{1000 * np.percentile(seconds[10:], share):.2f}" for share in (50, 99))


async def rate(child: Child, ask: Ask, stream: bool, concurrent: int, total: int) -> str:
    """Return tokens per second, and microseconds of CPU per sample in parent and child."""
    free = asyncio.Semaphore(concurrent)
    processes = psutil.Process(), psutil.Process(child.pid)

    async def one() -> int:
        async with free:
            return sum([len(tokens) async for tokens in ask(stream)])

    await asyncio.gather(*(one() for _ in range(concurrent)))
    before = [sum(process.cpu_times()[:2]) for process in processes]
    started = time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(total)))
    assert sum(counts) == total * TOKENS
    speed = total * TOKENS / (time.perf_counter() - started)
    used = [sum(process.cpu_times()[:2]) - cpu for process, cpu in zip(processes, before, strict=True)]
    return f"{speed:,.0f} ({1e6 * used[0] / total:.0f} + {1e6 * used[1] / total:.0f} us)"


async def measure(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    child, control, ask = await start(kind, busy=False)
    row = {
        "transport": kind,
        "control p50 / p99 ms": await latency(control, arguments.calls),
        "whole samples, tokens/s": await rate(child, ask, False, arguments.concurrent, 8 * arguments.concurrent),
        "streamed tokens/s": await rate(child, ask, True, arguments.concurrent, arguments.concurrent),
    }
    child.kill()
    await child.exited
    child, control, _ = await start(kind, busy=True)
    row["with a busy thread"] = await latency(control, arguments.calls)
    child.kill()
    await child.exited
    return row


def be_busy() -> None:
    while True:
        sum(range(1000))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.busy or os.environ.get(BUSY) == "1":
        threading.Thread(target=be_busy, daemon=True).start()
    if arguments.child:
        return FramesChild().serve()
    if BUSY in os.environ:
        return GrpcChild().serve()
    if rest:
        parser.error(f"unknown arguments: {rest}")

    async def rows() -> list[dict[str, Any]]:
        return [await measure(kind, arguments) for _ in range(arguments.rounds) for kind in ("frames", "grpc")]

    report("child_transport", asyncio.run(rows()), cores=os.cpu_count(), load=f"{arguments.concurrent} in flight")
    return None


if __name__ == "__main__":
    sys.exit(main())
