"""Scaling: time until a new rollout replica delivers, time to drain one, and lost groups (none).

`python -m benchmarks.scaling`. The whole stack on a tiny random model: real engines, a real trainer, the process
launcher. Repeatedly, two replicas are added to one and removed one by one while the run works,
every other one without time to finish its groups. Goal: 0 of at least 2,000 groups lost over at least 20 scale-ins.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.reporting import machine, report
from relaxd.board import Board, stages_for
from relaxd.cli.scale import ENDED, GOOD
from relaxd.client.coordinator_client import ENDED as RUN_ENDED
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.config import RunConfig
from relaxd.local import stack
from relaxd.local.state_folder import StateFolder
from relaxd.rpc.client import sync_channel
from relaxd.v1 import replica_pb2, replica_pb2_grpc
from relaxd.v1 import scaling_pb2 as pb
from relaxd.v1.coordinator_pb2 import Run
from tests.kit.boards import all_steps
from tests.kit.models import make_tiny_model

CONFIG = """
[run]
steps = 1000000
folder = "{folder}/runs"

[model]
path = "{folder}/tiny"

[data]
source = "addition"

[reward]
name = "addition"
workers = 1

[rollout]
samples_per_prompt = 4
max_new_tokens = 48
threads = 1

[algorithm]
drop_zero_variance = false

[trainer]
groups_per_step = 16
threads = 1

[trainer.checkpoint]
every = 0
"""
MAX_SECONDS = 120.0


def until(what: str, condition: Callable[[], object], tick: float = 0.02, seconds: float = MAX_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(tick)


class Figures:
    """Measured seconds."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self.coordinator = coordinator
        self.active: list[float] = []
        self.first_group: list[float] = []
        self.drained: list[float] = []
        self.gone: list[float] = []
        self.held: list[int] = []

    def follow(self, request: pb.ScaleRequest, begun: float) -> dict[int, float]:
        """Return the seconds from `begun` until each state of a request was first seen."""
        seen: dict[int, float] = {}
        while request.state not in ENDED:
            request = self.coordinator.scale_requests(1)[0]
            seen.setdefault(request.state, time.monotonic() - begun)
            time.sleep(0.02)
        if request.state not in GOOD:
            raise RuntimeError(f"a scale request failed: {request}")
        return seen

    def out(self, replicas: int) -> None:
        begun = time.monotonic()
        request = self.coordinator.scale_out(pb.ScaleOutRequest(replicas=replicas))
        self.active.append(self.follow(request, begun)[pb.SCALE_STATE_ACTIVE])
        for replica in self.coordinator.scale_requests(1)[0].scaled:
            with sync_channel(replica.address) as channel:
                ask = replica_pb2_grpc.ReplicaStub(channel).GetStatus
                until(
                    "a first group", lambda ask=ask: ask(replica_pb2.GetStatusRequest(), timeout=5).status.done_groups
                )
            self.first_group.append(time.monotonic() - begun)

    def into(self, drain_seconds: float) -> None:
        """Remove an added replica while it holds groups."""
        with contextlib.ExitStack() as channels:
            ask = {}
            for replica in self.coordinator.replicas():
                if replica.registration.launch_id:
                    channel = channels.enter_context(sync_channel(replica.registration.address))
                    ask[replica.registration.replica_id] = replica_pb2_grpc.ReplicaStub(channel).GetStatus
            held: dict[str, int] = {}

            def busy() -> bool:
                for name, get in ask.items():
                    held[name] = get(replica_pb2.GetStatusRequest(), timeout=5).status.held_groups
                return max(held.values()) > 0

            until("a replica that holds groups", busy)
        busiest = max(held, key=lambda name: held[name])
        self.held.append(held[busiest])
        begun = time.monotonic()
        request = pb.ScaleInRequest(replica_ids=[busiest], drain_seconds=drain_seconds)
        seen = self.follow(self.coordinator.scale_in(request), begun)
        self.gone.append(seen[pb.SCALE_STATE_DONE])
        self.drained.append(seen.get(pb.SCALE_STATE_REMOVING, self.gone[-1]))


def audit(redis: str, run: Run) -> tuple[int, int, Counter[str]]:
    """Return published, trained and dropped groups. Raises AssertionError if one was lost or trained twice."""
    config = RunConfig.model_validate_json(run.config_json)
    board = Board(redis, run.run_id, stages_for(config), config.board)
    counts = board.counts()
    trained = Counter(group for entry in all_steps(board, run.folder) for group in entry.plan["groups"])
    assert set(trained.values()) == {1}, "a group was trained twice"
    assert counts.trained == len(trained)
    assert counts.published == counts.trained + counts.dropped + counts.open
    return counts.published, counts.trained, Counter(counts.dropped_by_reason)


def spread(name: str, seconds: list[float]) -> dict[str, object]:
    return {
        "what": name,
        "times": len(seconds),
        "median s": round(statistics.median(seconds), 2),
        "least s": round(min(seconds), 2),
        "most s": round(max(seconds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="two scale-ins each")
    parser.add_argument("--groups", type=int, default=2000, help="go on until so many groups are published")
    options = parser.parse_args()
    before = machine()["load_before"]
    with tempfile.TemporaryDirectory() as name:
        folder = StateFolder(Path(name) / "state")
        make_tiny_model(Path(name) / "tiny")
        plan = stack.make_plan(folder, port=0, stop_with_parent=True)
        stack.up(folder, plan, print)
        try:
            with CoordinatorClient(plan.coordinator) as coordinator:
                coordinator.start_run(CONFIG.format(folder=name), "scaling")
                until("a first step", lambda: coordinator.run().step, 0.2)
                figures = Figures(coordinator)
                for number in range(options.rounds):
                    figures.out(3)
                    figures.into(30.0)
                    figures.into(0.0)
                    print(f"round {number + 1}: {coordinator.run().groups.published} groups", flush=True)
                until("enough groups", lambda: coordinator.run().groups.published >= options.groups, 0.5)
                coordinator.stop_run("scaling", "measured")
                until("the end", lambda: coordinator.run().state in RUN_ENDED, 0.2)
                ended_run = coordinator.run()
            published, trained, dropped = audit(plan.redis, ended_run)
        finally:
            stack.down(folder)
    scale_ins, ended = len(figures.gone), dropped.pop("run_ended", 0)
    lost = published - trained - ended
    rows = [
        spread("from ScaleOut (two replicas) to active", figures.active),
        spread("from ScaleOut to a replica's first group", figures.first_group),
        spread("drain, 30 s allowed", figures.drained[0::2]),
        spread("drain, handed back at once", figures.drained[1::2]),
        spread("from ScaleIn to gone", figures.gone),
    ]
    report(
        "scaling",
        rows,
        goal="0 lost of at least 2,000 groups over at least 20 scale-ins",
        met=lost == 0 and published >= 2000 and scale_ins >= 20,
        scale_ins=scale_ins,
        groups_published=published,
        groups_trained=trained,
        groups_cut_off_by_the_end_of_the_run=ended,
        groups_lost=lost,
        lost_by_reason=dict(dropped),
        groups_held_when_asked_to_leave=figures.held,
        load_at_the_start=before,
    )


if __name__ == "__main__":
    main()
