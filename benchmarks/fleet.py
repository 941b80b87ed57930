"""The control plane with 64, 256 and 512 rollout replicas: latency of calls, processors that coordinator and Redis use.

`python -m benchmarks.fleet --replicas 64,256,512 --seconds 30`. A real coordinator and a real Redis; scripted replicas
(benchmarks/fleet_parts.py) that register, lease eight GPUs each, send heartbeats at the real interval, take groups,
hold them for eight seconds and commit them. A step has as many groups as there are replicas, so that every replica
works all the time, and each step is followed by a weight synchronisation of all replicas. `--watchers` follow the run,
every second one with `only_changes`: "changes kB/s" is what one of these is sent, "watch kB/s" what one of the others.

Milliseconds are p50 / p99. Register and LeaseGpus are measured while all replicas start at once, until the last one has
registered ("start s"); Heartbeat in a window of `--seconds` that begins after the second step. "busy" is the share of
this machine's processors in use, by the scripted replicas, too. Goals: the coordinator uses at most one processor, and
p99 of Heartbeat is at most 100 ms.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import redis

from benchmarks.reporting import machine, report
from benchmarks.scaling import until
from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.embedded_redis import server_command, url, wait_until_up
from relaxd.process.ports import free_port
from relaxd.rpc.client import sync_channel
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.kit.tokenizer import write_tokenizer

IN_PROCESS = 64
"""Scripted replicas that share a process."""
CONFIG = """
[run]
steps = 1000000
folder = "{folder}/runs"

[model]
path = "{folder}/tokenizer"

[data]
source = "addition"

[reward]
name = "addition"

[rollout]
samples_per_prompt = 2
max_new_tokens = 8

[algorithm]
drop_zero_variance = false

[board]
max_staleness = 1

[weights]
verify = "never"

[trainer]
groups_per_step = {per_step}

[trainer.checkpoint]
every = 0
"""


class Part:
    """A process of scripted services."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "benchmarks.fleet_parts", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, command: str) -> dict[str, Any]:
        """Send a command; return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))


@contextlib.contextmanager
def running(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[psutil.Process]:
    """Run a process while the block lasts."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **(environment or {})})
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


def processor_seconds(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def percentiles(seconds: list[float]) -> str:
    """Return p50 and p99 in milliseconds."""
    if not seconds:
        return "-"
    p50, p99 = np.percentile(seconds, [50, 99])
    return f"{p50 * 1e3:.1f} / {p99 * 1e3:.0f}"


class Watcher:
    """Follows the run in a thread and counts the bytes of what it is sent."""

    def __init__(self, address: str, run_id: str, stop: threading.Event, *, only_changes: bool) -> None:
        self.only_changes, self.bytes = only_changes, 0
        self._address, self._run_id, self._stop = address, run_id, stop
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        request = pb.WatchRunRequest(run_id=self._run_id, max_seconds=300, only_changes=self.only_changes)
        with contextlib.suppress(grpc.RpcError), sync_channel(self._address) as to_coordinator:
            while not self._stop.is_set():
                for message in CoordinatorStub(to_coordinator).WatchRun(request, timeout=330):
                    self.bytes += message.ByteSize()
                    if self._stop.is_set():
                        return


def sent(watchers: list[Watcher], *, only_changes: bool) -> float:
    """Return the bytes that one watcher was sent, on average; 0 if there is none of this kind."""
    counts = [one.bytes for one in watchers if one.only_changes is only_changes]
    return sum(counts) / max(1, len(counts))


def measure(replicas: int, seconds: float, watchers: int, profile: Path | None) -> dict[str, Any]:
    """Return the figures of one fleet."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        write_tokenizer(folder / "tokenizer")
        port, redis_port = free_port(), free_port()
        address, redis_url = f"127.0.0.1:{port}", url(redis_port)
        server = stack.enter_context(running(server_command(folder / "redis", redis_port), folder / "redis.log"))
        wait_until_up(redis_url, seconds=10)
        flags = ["--port", str(port), "--redis", redis_url, "--replica-id", "coordinator"]
        python = [sys.executable, *(["-m", "cProfile", "-o", str(profile)] if profile else [])]
        environment = {"OMP_NUM_THREADS": "1"}
        coordinator = stack.enter_context(
            running([*python, "-m", "services.coordinator", *flags], folder / "coordinator.log", environment)
        )
        client = stack.enter_context(CoordinatorClient(address))
        until("the coordinator", lambda: answers(client), 0.2)
        begun = time.monotonic()
        parts = [Part("rest", 0, 0, address, redis_url)]
        for first in range(0, replicas, IN_PROCESS):
            parts.append(Part("rollout", first, min(IN_PROCESS, replicas - first), address, redis_url))
        for part in parts:
            stack.callback(part.process.wait)
            stack.callback(part.process.kill)
        until("all replicas", lambda: len(client.replicas()) >= replicas + 3, 1.0)
        registered = time.monotonic() - begun
        started = [part.tell("end") for part in parts]
        client.start_run(CONFIG.format(folder=folder, per_step=replicas), "fleet")
        stop = threading.Event()
        stack.callback(stop.set)
        watching = [Watcher(address, "fleet", stop, only_changes=bool(number % 2)) for number in range(watchers)]
        until("two steps", lambda: client.run("fleet").step >= 2, 0.5)
        store = redis.Redis.from_url(redis_url, socket_timeout=10.0)
        for part in parts:
            part.tell("begin")
        trained, memory = client.run("fleet").groups.trained, server.memory_info().rss
        before = [processor_seconds(one) for one in (coordinator, server)]
        operations = int(store.info("stats")["total_commands_processed"])
        whole, changed = sent(watching, only_changes=False), sent(watching, only_changes=True)
        idle, window = psutil.cpu_times(), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - window
        after = [processor_seconds(one) for one in (coordinator, server)]
        busy = psutil.cpu_times()
        whole = sent(watching, only_changes=False) - whole
        changed = sent(watching, only_changes=True) - changed
        operations = int(store.info("stats")["total_commands_processed"]) - operations
        ended = [part.tell("end") for part in parts]
        groups = (client.run("fleet").groups.trained - trained) / took
        memory = server.memory_info().rss - memory
    calls = {name: [s for one in started for s in one["seconds"].get(name, [])] for name in ("Register", "LeaseGpus")}
    beats = [s for one in ended for s in one["seconds"].get("Heartbeat", [])]
    failed = sum(sum(one["failed"].values()) for one in [*started, *ended])
    cores = (psutil.cpu_count() or 1) * took
    return {
        "replicas": replicas,
        "start s": round(registered, 1),
        "Register ms": percentiles(calls["Register"]),
        "LeaseGpus ms": percentiles(calls["LeaseGpus"]),
        "Heartbeat ms": percentiles(beats),
        "beats/s": round(len(beats) / took),
        "failed": failed,
        "groups/s": round(groups, 1),
        "coordinator cores": round((after[0] - before[0]) / took, 3),
        "Redis cores": round((after[1] - before[1]) / took, 3),
        "Redis op/s": round(operations / took),
        "Redis +MB": round(memory / 1e6, 1),
        "watch kB/s": round(whole / took / 1e3, 2),
        "changes kB/s": round(changed / took / 1e3, 2),
        "busy": f"{1 - (busy.idle - idle.idle) / cores:.0%}",
    }


def answers(client: CoordinatorClient) -> bool:
    """Return whether the coordinator answers."""
    try:
        client.replicas()
    except CliError:
        return False
    return True


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="64,256,512", help="sizes of the fleet")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the window")
    parser.add_argument("--watchers", type=int, default=2, help="clients that follow the run")
    parser.add_argument("--profile", type=Path, help="a file for cProfile's figures of the coordinator's main thread")
    options = parser.parse_args()
    before = machine()["load_before"]
    rows = []
    for replicas in map(int, options.replicas.split(",")):
        rows.append(measure(replicas, options.seconds, options.watchers, options.profile))
        print(rows[-1], flush=True)
    largest = rows[-1]
    met = float(largest["coordinator cores"]) <= 1 and float(str(largest["Heartbeat ms"]).split("/")[1]) <= 100
    goal = "coordinator <= 1 core and p99 of Heartbeat <= 100 ms with the largest fleet"
    report("fleet", rows, goal=goal, met=met, seconds=options.seconds, watchers=options.watchers, load_at_start=before)


if __name__ == "__main__":
    main()
