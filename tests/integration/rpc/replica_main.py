"""A replica process for tests: run_replica with a service that prints what is asked of it, one word pair per line.

FAIL_STARTS: number of start_run calls that fail. SLOW_START: start_run takes for ever when the run id begins with it.
ENGINE_RANKS: what start_run makes of engine_ranks. GPU_WAIT: what its leases on GPUs wait for.
STOP_HANGS: stop_run never returns, and nothing else goes on meanwhile.
HELD: groups that it holds until it is drained; draining takes DRAIN_SECONDS for all but STUCK of them, and lasts until
the file DRAIN_UNTIL is there.
"""

import asyncio
import os
import time
from pathlib import Path

from relaxd.config import RunConfig
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaService, ServiceStatus, open_context
from relaxd.roles import REWARD
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.v1.replica_pb2 import REPLICA_WAIT_SERVICE


def say(*words: object) -> None:
    print(*words, flush=True)


class Talkative(ReplicaService):
    role = REWARD

    def __init__(self) -> None:
        self.failures = int(os.environ.get("FAIL_STARTS", "0"))
        self.held = int(os.environ.get("HELD", "0"))
        self.stuck = int(os.environ.get("STUCK", "0"))
        self.drain_seconds = float(os.environ.get("DRAIN_SECONDS", "0"))
        self.drain_until = os.environ.get("DRAIN_UNTIL")
        self.started_at = self.seconds_between_starts = 0.0

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        self.seconds_between_starts, self.started_at = time.monotonic() - self.started_at, time.monotonic()
        say("start", assignment.run_id)
        self.engine_ranks = int(os.environ.get("ENGINE_RANKS", "0"))
        if assignment.run_id.startswith("slow"):
            try:
                await asyncio.Event().wait()
            finally:
                say("cancelled", assignment.run_id)
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is full")

    async def stop_run(self) -> None:
        say("stop")
        if os.environ.get("STOP_HANGS"):
            time.sleep(3600)  # the event loop, too

    async def pause_run(self) -> None:
        say("pause")

    async def resume_run(self) -> None:
        say("resume")

    async def drain(self, seconds: float) -> int:
        say("drain")
        await asyncio.sleep(self.drain_seconds)
        while self.drain_until and not Path(self.drain_until).exists():
            await asyncio.sleep(0.02)
        self.held = self.stuck
        return self.held

    def status(self) -> ServiceStatus:
        gauges = {"pid": os.getpid(), "seconds_between_starts": self.seconds_between_starts}
        return ServiceStatus(held_groups=self.held, detail="talking", wait=REPLICA_WAIT_SERVICE, gauges=gauges)


async def main() -> None:
    async with open_context(parse_settings("reward")) as context:
        context.gpus.waiting = os.environ.get("GPU_WAIT", "")
        await run_replica(Talkative(), context)


if __name__ == "__main__":
    asyncio.run(main())
