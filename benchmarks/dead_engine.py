"""Recovery time when an engine is lost during a weight broadcast.

    python -m benchmarks.dead_engine --times 50            # CPU, gloo: about 20 minutes
    python -m benchmarks.dead_engine --times 2             # a smoke test

The whole stack on one machine: coordinator, trainer, two rollout replicas with transformers engines, on a random model
with a slow broadcast. Repeatedly, at a random moment of a synchronisation, one engine's process is killed (SIGKILL: its
connections break) or frozen (SIGSTOP: its connections stay open; it is killed once the others have recovered). Measured
from that moment:

synchronised    until the other engine serves the version that was being sent, or a later one: the trainer has aborted
                the broken broadcast, joined a new weight group and sent everything again. Goal: p99 at most
                weights.timeout_seconds + 2 s
next step       until the trainer has committed its next step. That includes prompts, answers of the remaining
                engine, and possibly groups that the lost one held

The trainer must be the same process throughout. A moment at which both engines had the version already doesn't count
and is repeated.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.reporting import machine, report
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local import stack
from relaxd.local.state_folder import StateFolder
from relaxd.rpc.client import sync_channel
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.kit.models import make_tiny_model

CONFIG = """
[run]
steps = 1000000
folder = "{folder}/runs"

[model]
path = "{folder}/model"

[data]
source = "addition"

[reward]
name = "addition"
workers = 1

[rollout]
samples_per_prompt = 2
max_new_tokens = 8
threads = 1

[algorithm]
drop_zero_variance = false

[trainer]
groups_per_step = 4
threads = 1

[trainer.checkpoint]
every = 0

[board]
lease_seconds = 5
max_staleness = 2

[weights]
timeout_seconds = {timeout}
connect_timeout_seconds = {timeout}
bucket_bytes = 4194304

[health]
stuck_seconds = 10
max_restarts = 100000
first_backoff_seconds = 0.0
max_sync_failures = 100000
"""
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8}
PATIENCE_SECONDS = 180.0


def until(what: str, look: Callable[[], Any], tick: float = 0.002) -> Any:
    """Wait for a condition, retrying calls to the coordinator that fail."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
        time.sleep(tick)
    raise TimeoutError(f"not within {PATIENCE_SECONDS:.0f} s: {what}")


def children(state: StateFolder, role: str, module: str) -> dict[str, psutil.Process]:
    """Find the processes of a module below the services of a role, by service name."""
    found = {}
    services = stack_state.services if (stack_state := state.read()) else ()
    for service in services:
        if service.role == role and service.pid is not None:
            try:
                for process in psutil.Process(service.pid).children(recursive=True):
                    if module in process.cmdline():
                        found[service.name] = process
            except psutil.Error:
                continue  # it has just ended
    return found


class Bench:
    """The running stack, and the loss of its engines."""

    def __init__(self, state: StateFolder, stub: CoordinatorStub, seed: int) -> None:
        self._state = state
        self._stub = stub
        self._random = random.Random(seed)
        self._typical = 0.1
        self._last = 0
        """The version announced at the end of the last case."""

    def weights(self) -> pb.GetWeightsResponse:
        """Return the versions on trainer and engines."""
        return self._stub.GetWeights(pb.GetWeightsRequest(), timeout=5)

    def step(self) -> int:
        """Return the last committed step."""
        return int(self._stub.GetRun(pb.GetRunRequest(), timeout=5).run.step)

    def both_serve(self) -> pb.GetWeightsResponse | None:
        """Return the version that both engines serve, None if there is only one. A lost engine has no version."""
        weights = self.weights()
        oldest = max(self._last + 1, weights.announced.version - 1, 2)
        serving = [engine for engine in weights.engines if engine.HasField("weights")]
        recent = [engine for engine in serving if engine.weights.version >= oldest]
        return weights if len(recent) == 2 else None

    def lose(self, how: str) -> dict[str, float] | None:
        """Lose an engine once; return the seconds to recovery, None if it was too late."""
        until("two engines that serve", self.both_serve, 0.05)
        engines = until("two engines", lambda: (e := self.engines()) and len(e) == 2 and e, 0.05)
        before = self.both_serve()
        if before is None:
            return None
        self._typical = 0.8 * self._typical + 0.2 * before.last_sync_seconds
        until("a synchronisation", lambda: self.weights().last_sync_id > before.last_sync_id, 0.0)
        time.sleep(self._random.uniform(0, 0.9 * self._typical))  # a chosen moment, not a wait
        name = self._random.choice(sorted(engines))
        victim = engines[name]
        try:
            victim.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        except psutil.NoSuchProcess:  # the coordinator has just had it restarted
            return None
        lost = time.monotonic()
        try:
            weights, step = self.weights(), self.step()
            self._last = version = int(weights.announced.version)
            if sum(engine.weights.version >= version for engine in weights.engines) == 2:
                return None

            def one_serves() -> bool:
                others = [engine for engine in self.weights().engines if not engine.replica_id.startswith(name)]
                return any(engine.weights.version >= version for engine in others)

            found: dict[str, float] = {}

            def look() -> bool:
                if "synchronised" not in found and one_serves():
                    found["synchronised"] = time.monotonic() - lost
                if "next step" not in found and self.step() > step:
                    found["next step"] = time.monotonic() - lost
                return len(found) == 2

            until("recovery", look)
            self._last = int(self.weights().announced.version)
            return found
        finally:
            if victim.is_running():
                victim.kill()  # works for a frozen process too

    def engines(self) -> dict[str, psutil.Process]:
        """Return the engines' processes."""
        return children(self._state, "rollout", "services.rollout.engines.transformers.transformers_process")

    def trainer(self) -> int:
        """Return the process id of the trainer's rank."""
        (rank,) = children(self._state, "trainer", "services.trainer.loop.training_rank").values()
        return rank.pid


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile; the maximum of fewer than 100 values."""
    return sorted(seconds)[max(0, -(-99 * len(seconds) // 100) - 1)]


def rows_of(found: dict[str, list[dict[str, float]]], limit: float) -> list[dict[str, Any]]:
    """Return two rows for each way of losing an engine."""
    return [
        {
            "engine": how,
            "until": name,
            "times": len(times),
            "median s": statistics.median(each[name] for each in times),
            "p99 s": p99([each[name] for each in times]),
            "most s": max(each[name] for each in times),
            "goal, p99 s": limit if name == "synchronised" else "",
        }
        for how, times in found.items()
        for name in ("synchronised", "next step")
        if times
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50, help="engines to lose, half of them killed, half frozen")
    parser.add_argument("--timeout", type=float, default=5.0, help="of broadcasting, and of connecting")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    load = machine()["load_before"]
    found: dict[str, list[dict[str, float]]] = {"killed": [], "frozen": []}
    missed = 0
    with tempfile.TemporaryDirectory(prefix="relaxd-bench-") as name:
        folder = StateFolder(Path(name) / "state")
        make_tiny_model(Path(name) / "model", architecture="qwen3", head_dim=64, **SIZES)
        plan = stack.make_plan(folder, port=0, replicas={"rollout": 2}, stop_with_parent=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        stack.up(folder, plan, print)
        try:
            with CoordinatorClient(plan.coordinator) as coordinator, sync_channel(plan.coordinator) as channel:
                coordinator.start_run(CONFIG.format(folder=name, timeout=options.timeout), "dead-engine")
                bench = Bench(folder, CoordinatorStub(channel), options.seed)
                until("both engines", bench.both_serve, 0.1)
                trainer = bench.trainer()
                while (done := sum(map(len, found.values()))) < options.times:
                    how = ("killed", "frozen")[done % 2]
                    seconds = bench.lose(how)
                    if seconds is None:
                        missed += 1
                        continue
                    assert bench.trainer() == trainer, "the trainer was restarted"
                    found[how].append(seconds)
                    print(f"{done + 1}: {how}, " + ", ".join(f"{k} {v:.2f} s" for k, v in seconds.items()), flush=True)
        except BaseException:
            for service in ("coordinator", "trainer", "rollout-1", "rollout-2"):
                print(f"--- {service}", *folder.log_tail(service, 12), sep="\n")
            raise
        finally:
            stack.down(folder)
    report(
        "dead-engine",
        rows_of(found, options.timeout + 2.0),
        goal="p99 of at most weights.timeout_seconds + 2 s",
        timeout_seconds=options.timeout,
        too_late_and_repeated=missed,
        trainer_restarts=0,
        load_at_the_start=load,
    )


if __name__ == "__main__":
    main()
