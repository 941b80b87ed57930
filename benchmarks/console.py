"""Time until the console's page is there, and memory of console and page, with 500 replicas and 10,000 steps.

`python -m benchmarks.console`. The console is the real service, and the page is in a real Chromium. A stand-in for the
coordinator, in this process, answers the calls that the page makes: a run of 10,000 steps whose metrics.jsonl is read
as the coordinator reads it, 500 rollout replicas with 8 GPUs each, and changes at ten times the usual rate, 10 a
second, of which every fiftieth is a new step.
`--picture FILE` writes a picture of the page (docs/console.png).
"""

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
from playwright.sync_api import Page

from benchmarks.reporting import report
from relaxd.client.metric_series import read_series
from relaxd.client.run_changes import changes
from relaxd.process.ports import free_port
from relaxd.run_folder import METRICS
from relaxd.telemetry.metrics import METRICS as KNOWN
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import health_pb2, replica_pb2, scaling_pb2
from relaxd.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from tests.kit.browser import browser_page

RUN = "addition-7b"
REPLICAS, GPUS, STEPS = 500, 8, 10_000
TOTAL = 12_000
"""Steps to do."""
STEP_SECONDS = 5.0
GROUPS = 512
"""Groups of a step."""
CHANGES = 10.0
"""Changes of the run a second; a coordinator sends one a second."""
FIRST_PAINT_SECONDS = 1.0
WAIT_MS = 60_000


def metrics_of(step: int, noise: random.Random) -> dict[str, float]:
    """Return the numbers of a step: those that people look at have a course, the rest of the table has noise."""
    part = step / TOTAL
    values = {name: noise.random() for name, one in KNOWN.items() if one.kind == "step" and "*" not in name}
    reward = 0.12 + 0.75 / (1 + math.exp(-9 * (part - 0.35))) + noise.gauss(0, 0.015)
    return values | {
        "reward_mean": reward,
        "reward_median": min(1.0, reward + 0.03),
        "response_length_mean": 420 + 900 * part + noise.gauss(0, 18),
        "tokens_per_second": 412_000 + noise.gauss(0, 6000),
        "step_seconds": 21 + 6 * part + noise.gauss(0, 0.4),
        "staleness_mean": 0.9 + noise.gauss(0, 0.06),
        "staleness_max": 2.0,
        "entropy": 1.4 * math.exp(-1.8 * part) + noise.gauss(0, 0.01),
        "grad_norm": 0.5 * math.exp(-2 * part) + abs(noise.gauss(0, 0.05)),
        "logprob_difference": 2.1e-3 + abs(noise.gauss(0, 1e-4)),
        "commit_time": 1.8e9 + 24.0 * step,
    }


class StandIn(CoordinatorServicer):
    """Answers for a coordinator of a large run, which changes as fast as it is asked to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._noise = random.Random(7)
        self._began = time.monotonic()
        with (folder / METRICS).open("w") as file:
            for step in range(1, STEPS + 1):
                file.write(json.dumps({"step": step, **metrics_of(step, self._noise)}) + "\n")
        self._replicas = [self._replica(number) for number in range(REPLICAS)]
        self._config = json.dumps({"run": {"steps": TOTAL}, "trainer": {"groups_per_step": GROUPS}})

    @property
    def step(self) -> int:
        """The last step."""
        return STEPS + int((time.monotonic() - self._began) / STEP_SECONDS)

    def run(self) -> pb.Run:
        """Return the run as it is now."""
        step, pick = self.step, self._noise.randint
        run = pb.Run(
            run_id=RUN,
            state=pb.RUN_STATE_RUNNING,
            step=step,
            steps=TOTAL,
            oldest_engine_version=step - 1,
            folder=f"/runs/{RUN}",
            config_json=self._config,
            remaining_seconds=24.0 * (TOTAL - step),
            metrics=metrics_of(step, self._noise),
        )
        run.create_time.FromNanoseconds(int((time.time() - 24.0 * step) * 1e9))
        groups = run.groups
        groups.trained, groups.open, groups.dropped = GROUPS * step, 1104 + pick(0, 80), 31 * step
        groups.published = groups.trained + groups.open + groups.dropped
        groups.dropped_by_reason.update({"zero_variance": 28 * step, "stale": 2 * step, "reward_failed": step})
        for stage, waiting, held in (("rollout", 96, 640), ("reward", 12, 34), ("advantage", 0, 3), ("train", 190, 61)):
            run.queues.add(stage=stage, waiting=waiting + pick(0, 12), held=held + pick(0, 12))
        for one in self._replicas:
            run.health.add(role="rollout", instance=one.registration.replica_id, state=health_pb2.HEALTH_STATE_HEALTHY)
        run.health[pick(0, REPLICAS - 1)].restarts = pick(0, 3)  # so that this list changes, too
        return run

    def _replica(self, number: int) -> pb.RegisteredReplica:
        name = f"rollout-{number + 1}"
        uuids = [f"GPU-{number:04x}{gpu:04x}" for gpu in range(GPUS)]
        registration = pb.Registration(
            replica_id=name, role="rollout", address=f"10.0.{number // 250}.{number % 250}:50051"
        )
        status = replica_pb2.ReplicaStatus(replica_id=name, role="rollout", state=replica_pb2.REPLICA_STATE_READY)
        return pb.RegisteredReplica(
            registration=registration, status=status, leased_gpu_uuids=uuids, leased_gpu_share=1
        )

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        """Return the run."""
        return pb.GetRunResponse(run=self.run())

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        """Return the only run."""
        return pb.ListRunsResponse(runs=[pb.Run(run_id=RUN, state=pb.RUN_STATE_RUNNING, steps=TOTAL)])

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        """Stream changes until the caller leaves."""
        before = self.run()
        yield pb.WatchRunResponse(run=before, resume_token="1")
        while True:
            await asyncio.sleep(1 / CHANGES)
            now = self.run()
            yield changes(before, now)
            before = now

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        """Return series as the coordinator does."""
        return pb.GetMetricsResponse(series=await asyncio.to_thread(read_series, self._folder, request))

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Any) -> pb.ListReplicasResponse:
        """Return all replicas, whose statuses have changed since the last call."""
        for one in self._replicas:
            one.status.held_groups = self._noise.randint(0, 4)
            one.status.done_groups = GROUPS * self.step // REPLICAS
            one.status.weights.version = self.step - (self._noise.random() < 0.1)
        trainer = pb.RegisteredReplica(registration=pb.Registration(replica_id="trainer", role="trainer"))
        trainer.status.state = replica_pb2.REPLICA_STATE_READY
        trainer.leased_gpu_uuids.extend(f"GPU-f{gpu:07x}" for gpu in range(512))
        others = [
            pb.RegisteredReplica(
                registration=pb.Registration(replica_id=f"{role}-{number}", role=role),
                status=replica_pb2.ReplicaStatus(
                    state=replica_pb2.REPLICA_STATE_READY, done_groups=GROUPS * STEPS // count
                ),
            )
            for role, count in (("advantage", 2), ("reward", 24))
            for number in range(1, count + 1)
        ]
        return pb.ListReplicasResponse(replicas=[*others, *self._replicas, trainer])

    async def GetWeights(self, request: pb.GetWeightsRequest, context: Any) -> pb.GetWeightsResponse:
        """Return the newest version."""
        step = self.step
        return pb.GetWeightsResponse(
            announced=replica_pb2.WeightVersion(term=1, version=step), last_sync_id=step, last_sync_seconds=1.84
        )

    async def CancelScaleRequests(
        self, request: scaling_pb2.CancelScaleRequestsRequest, context: Any
    ) -> scaling_pb2.CancelScaleRequestsResponse:
        """Let the console find that its viewer may act."""
        return scaling_pb2.CancelScaleRequestsResponse()


@contextmanager
def stand_in(folder: Path) -> Iterator[str]:
    """Serve a stand-in in a thread. Yields its address."""
    address, loop = f"127.0.0.1:{free_port()}", asyncio.new_event_loop()
    ready: futures.Future[None] = futures.Future()

    async def serve() -> None:
        server = grpc.aio.server()
        add_CoordinatorServicer_to_server(StandIn(folder), server)
        server.add_insecure_port(address)
        await server.start()
        ready.set_result(None)
        await server.wait_for_termination()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    ready.result(timeout=120)
    yield address


@contextmanager
def console(coordinator: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a console. Yields its URL and its process."""
    port = free_port()
    words = [sys.executable, "-m", "services.console", "--coordinator", coordinator, "--port", str(port)]
    program = subprocess.Popen(words, env=os.environ | {"RELAXD_TOKEN": ""})
    try:
        yield f"http://127.0.0.1:{port}/", psutil.Process(program.pid)
    finally:
        program.terminate()
        program.wait(timeout=30)


def open_page(page: Page, url: str) -> dict[str, float]:
    """Open the page anew; return the seconds until it is painted, and until the picture and its curves are there."""
    begun = time.monotonic()
    page.goto(url)
    page.locator("[data-stage]").first.wait_for(timeout=WAIT_MS)
    picture = time.monotonic() - begun
    page.locator(".spark canvas").first.wait_for(timeout=WAIT_MS)
    curves = time.monotonic() - begun
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return {"first paint": paint / 1000, "picture": picture, "its curves": curves}


def megabytes(page: Page, process: psutil.Process) -> dict[str, float]:
    """Return the memory of the page's JavaScript, without garbage, and of the console."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return {"page MB": used / 1e6, "console MB": process.memory_info().rss / 1e6}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--picture", type=Path, help="write a picture of the page there, and measure nothing else")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        stand_in(Path(name)) as coordinator,
        console(coordinator) as (url, process),
    ):
        with browser_page(width=1360, height=1040) as (page, errors):
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    page.goto(url)
                    break
                except Exception:  # it is starting
                    time.sleep(0.2)
            times = [open_page(page, f"{url}?{number}#/{RUN}/run") for number in range(5)]
            if options.picture:
                page.wait_for_timeout(8000)
                page.screenshot(path=options.picture)
                return
            begun = time.monotonic()
            page.goto(f"{url}?charts#/{RUN}/curves")
            page.locator(".chart canvas").first.wait_for(timeout=WAIT_MS)
            charts = time.monotonic() - begun
            page.goto(f"{url}?memory#/{RUN}/run")
            page.locator(".spark canvas").first.wait_for(timeout=WAIT_MS)
            rows: list[dict[str, float]] = []
            begun = time.monotonic()
            while (age := time.monotonic() - begun) < 60 * options.minutes + 1:
                rows.append({"minute": age / 60, **megabytes(page, process)})
                print(rows[-1], flush=True)
                page.wait_for_timeout(30_000)
            assert errors == [], errors
        best = min(times, key=lambda one: one["picture"])
        median = sorted(one["first paint"] for one in times)[len(times) // 2]
        cpu = process.cpu_times()
        report(
            "console",
            rows,
            replicas=REPLICAS,
            steps=STEPS,
            changes_a_second=CHANGES,
            first_paint_seconds=round(median, 3),
            limit_of_first_paint_seconds=FIRST_PAINT_SECONDS,
            best_opening_seconds={key: round(value, 3) for key, value in best.items()},
            first_charts_seconds=round(charts, 3),
            console_cpu_share=round((cpu.user + cpu.system) / (time.time() - process.create_time()), 3),
        )


if __name__ == "__main__":
    main()
