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
from typing import Any

import numpy as np
import psutil

from benchmarks.reporting import report
from relaxd.process.child import LIFELINE_VARIABLE, Child
from relaxd.process.child_server import ChildServer
from relaxd.v1 import replica_pb2, replica_pb2_grpc, rollout_pb2, rollout_pb2_grpc

TOKENS = 256
TEXT = "x" * 600
FLUSH_SECONDS = 0.05
PAUSE_SECONDS = 0.01
"""Pause between two control calls. Without it the child's busy thread might not get the GIL back in between."""
HEADER = struct.Struct("<I")
MODULE = "benchmarks.child_transport"

Part = tuple[int, list[int], list[float], list[int], bool]
"""New tokens, log-probs and versions of a request's sample, and whether it has ended."""
Ask = Callable[[bool], AsyncIterator[np.ndarray]]


class Engine(threading.Thread):
    """Answers requests."""

    def __init__(self, deliver: Callable[[list[Part]], None]) -> None:
        super().__init__(daemon=True)
        self._deliver = deliver
        self._requests: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self.start()

    def submit(self, number: int, stream: bool) -> None:
        self._requests.put((number, stream))

    def run(self) -> None:
        running: dict[int, int] = {}
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


class GrpcChild(rollout_pb2_grpc.RolloutServicer, replica_pb2_grpc.ReplicaServicer):
    """Answers as the engines' processes do: a stream for each request, flushed by time."""

    def __init__(self) -> None:
        self._engine = Engine(self._deliver)
        self._queues: dict[int, asyncio.Queue[Part]] = {}
        self._lock = threading.Lock()
        self._pending: list[Part] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def GetStatus(self, request: replica_pb2.GetStatusRequest, context: Any) -> replica_pb2.GetStatusResponse:
        return replica_pb2.GetStatusResponse(detail="fine")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        self._loop = asyncio.get_running_loop()
        number, parts = len(self._queues), asyncio.Queue()
        self._queues[number] = parts
        self._engine.submit(number, not request.final_only)
        ended = False
        while not ended:
            _, tokens, logprobs, versions, ended = await parts.get()
            yield rollout_pb2.GenerateResponse(
                tokens=tokens, logprobs=logprobs, versions=versions, text=TEXT if ended else ""
            )

    def _deliver(self, parts: list[Part]) -> None:
        assert self._loop is not None
        with self._lock:
            first = not self._pending
            self._pending += parts
        if first:
            self._loop.call_soon_threadsafe(self._flush_soon)

    def _flush_soon(self) -> None:
        assert self._loop is not None
        self._loop.call_later(0 if self._pending[0][-1] else FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        with self._lock:
            parts, self._pending = self._pending, []
        joined: dict[int, Part] = {}
        for number, *new, ended in parts:
            known = joined.get(number, (number, [], [], [], False))
            joined[number] = (number, *(old + more for old, more in zip(known[1:4], new, strict=True)), ended)  # type: ignore[assignment]
        for number, part in joined.items():
            self._queues[number].put_nowait(part)


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
            self._engine.submit(message["id"], message["params"]["stream"])
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
        number = await self.request("generate", prompt=list(range(32)), stream=stream)
        ended = False
        while not ended:
            (tokens, logprobs, versions), ended = await self._queues[number].get()
            np.array(logprobs, np.float32)
            np.array(versions, np.int64)
            yield np.array(tokens, np.int32)
        del self._queues[number]


def _base64(values: list[Any]) -> str:
    return base64.b64encode(np.array(values).tobytes()).decode()


async def start(kind: str, busy: bool) -> tuple[Child, Callable[[], Any], Ask]:
    """Start a child. Returns it, its control call, and its generation."""
    child = await Child.start(MODULE, ["--child", kind, *(["--busy"] if busy else [])])
    if kind == "frames":
        assert child._reading is not None
        child._reading.cancel()
        parent = FramesParent(child)
        reader = child._writer.transport.get_protocol()._stream_reader  # type: ignore[union-attr]
        child._reading = asyncio.create_task(parent.read(reader))
        return child, lambda: parent.request("status"), parent.ask
    status, rollout = replica_pb2_grpc.ReplicaStub(child.channel), rollout_pb2_grpc.RolloutStub(child.channel)

    async def ask(stream: bool) -> AsyncIterator[np.ndarray]:
        request = rollout_pb2.GenerateRequest(prompt_tokens=list(range(32)), n=1, final_only=not stream)
        async for part in rollout.Generate(request, timeout=60):
            np.array(part.logprobs, np.float32)
            np.array(part.versions, np.int64)
            yield np.array(part.tokens, np.int32)

    return child, lambda: status.GetStatus(replica_pb2.GetStatusRequest(), timeout=60), ask


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
    child, control, _ = await start(kind, busy=True)
    row["with a busy thread"] = await latency(control, arguments.calls)
    child.kill()
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
    parser.add_argument("--child", choices=("grpc", "frames"), default="", help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.busy:
        threading.Thread(target=be_busy, daemon=True).start()
    if arguments.child == "frames":
        return FramesChild().serve()
    if arguments.child == "grpc":
        child = GrpcChild()
        add = (rollout_pb2_grpc.add_RolloutServicer_to_server, replica_pb2_grpc.add_ReplicaServicer_to_server)
        return ChildServer(*((each, child) for each in add)).serve()

    async def rows() -> list[dict[str, Any]]:
        return [await measure(kind, arguments) for _ in range(arguments.rounds) for kind in ("frames", "grpc")]

    report("child_transport", asyncio.run(rows()), cores=os.cpu_count(), load=f"{arguments.concurrent} in flight")
    return None


if __name__ == "__main__":
    sys.exit(main())
