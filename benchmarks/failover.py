"""Cost of a failover of Redis, and a check that nothing is lost.

`python -m benchmarks.failover --failovers 50`. A primary with one replica and three Sentinels, all real servers.
Groups are published, go through three stages (a process) and are trained (a process), each step committed once. Again
and again the primary is killed (SIGKILL) at a random moment, every second time with a replica that lags behind. The
Sentinels promote the replica, and the dead server comes back as the replica of the other. At the end everything that
was acknowledged must be there:

- every group whose publish returned is open, in the ledger or dropped, and published = open + trained + dropped;
- every step whose commit returned is in the ledger with the same plan, and no group is in two steps.

With --wait-replicas 0 it isn't: what the replica lacked is lost. --cluster does the same in a Redis Cluster of three
primaries, of which the one with the run's keys has a replica.
"""

import argparse
import contextlib
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import report
from relaxd.board import Board, BoardUnavailable, Column, GateClosed, NewGroup, Stage, StageWorker, StepConflict
from relaxd.board.types import Delivery
from relaxd.config import BoardConfig
from tests.kit.boards import audit
from tests.kit.processes import kill, start_python
from tests.kit.redis.clusters import ClusterServers
from tests.kit.redis.sentinels import WatchedRedis
from tests.kit.waiting import wait_until

RUN = "failover"
STAGES = (
    Stage("one", ("of_publish",), ("of_one",)),
    Stage("two", ("of_one",), ("of_two",)),
    Stage("three", ("of_two",), ("of_three",)),
    Stage("train", ("of_three",), ()),
)
LIMITS = BoardConfig(max_staleness=1, lease_seconds=5.0, max_deliveries=1000)
GROUPS_PER_STEP = 4
STEPS = 1_000_000
SIZES = (1_000, 100_000)
"""Bytes of a column: most share a payload, some have slices of their own."""
QUIET_SECONDS = (0.0, 1.5)
"""Bounds of the time from the last recovery to the next kill."""
LAG_SECONDS = 0.3
"""Time that the replica gets nothing before every second kill."""
RECOVERY_SECONDS = 120.0
SENTINELS = 3


@dataclass
class Outcome:
    """Findings of a campaign."""

    failovers: int
    without_progress: list[float] = field(default_factory=list)
    """Seconds around each kill between two acknowledged steps."""
    promotions: list[float] = field(default_factory=list)
    """Seconds from each kill until the Sentinel named the next primary; the rest waits for the replica of that one."""
    unasked: int = 0
    """Promotions while the primary lived: the Sentinel got no answer in time. Then a server may take over that hasn't
    synchronised since it started, and what was acknowledged is lost."""
    steps: int = 0
    groups: int = 0
    lost: list[str] = field(default_factory=list)
    """Acknowledged writes that are missing, or there twice."""


def open_board(url: str) -> Board:
    """Connect to the run's board."""
    return Board(url, RUN, STAGES, LIMITS, timeout_seconds=2.0, retry_seconds=3.0)


def stages(url: str) -> None:
    """Work on all stages but the last, until the end of the process."""
    board = open_board(url)
    for stage in STAGES[:-1]:

        def process(delivery: Delivery, columns: dict[str, Column], writes: str = stage.writes[0]) -> dict[str, Column]:
            size = SIZES[hash(delivery.group_id) % 8 == 0]
            return {writes: np.full(size, next(iter(columns.values()))[0] + 1, dtype=np.uint8)}  # type: ignore[index, call-overload]

        StageWorker(board, stage.name, "stages", process, concurrency=2).start()
    sys.stdin.read()  # until the parent ends


def train(url: str) -> None:
    """Commit steps, and write a line for each that was acknowledged, until the end of the process."""
    board = open_board(url)
    term, held = 0, {}
    while True:
        try:
            term = term or board.new_trainer_term()
            for delivery in board.take("train", "trainer", count=GROUPS_PER_STEP, block_seconds=0.2):
                held[delivery.group_id] = delivery
            board.renew("train", "trainer", list(held.values()))
            if len(held) < GROUPS_PER_STEP:
                continue
            groups = sorted(held)[:GROUPS_PER_STEP]
            step = board.last_step() + 1
            plan = {"groups": groups, "once": secrets.token_hex(4)}
            _persist(partial(board.commit_step, term=term, step=step, plan=plan, metrics={}))
        except BoardUnavailable:
            continue  # named: Board waits for its retry_seconds
        except StepConflict:  # as the trainer's restart does: what it had may be of a primary that lost it
            term, held = 0, {}
            continue
        print(json.dumps({"step": step, "plan": plan, "time": time.monotonic()}), flush=True)
        for group_id in groups:
            del held[group_id]


def _persist(operation: Any) -> None:
    """Repeat an operation until Redis answers."""
    while True:
        try:
            return operation()
        except BoardUnavailable:
            continue  # named: Board waits for its retry_seconds


class Publisher(threading.Thread):
    """Publishes groups, and remembers those whose publish returned."""

    def __init__(self, board: Board) -> None:
        super().__init__(name="publisher", daemon=True)
        self._board = board
        self._ended = threading.Event()
        self.acknowledged: list[str] = []

    def run(self) -> None:
        """Publish whenever the gate is open; each batch is repeated until it is acknowledged."""
        number = 0
        while not self._ended.is_set():
            ids = [f"{number + offset:06d}" for offset in range(GROUPS_PER_STEP)]
            groups = [NewGroup(id, {"of_publish": np.zeros(10, dtype=np.uint8)}, worst_bytes=1) for id in ids]
            step = _persist(self._board.last_step)
            _persist(partial(self._board.set_gate, term=1, oldest_version=step, open=True))
            try:
                _persist(partial(self._board.publish, term=1, groups=groups, cursor=number))
            except GateClosed:
                self._ended.wait(0.01)
                continue
            number += len(ids)
            self.acknowledged += ids

    def end(self) -> None:
        """Stop publishing."""
        self._ended.set()
        self.join()


def campaign(
    folder: Path,
    failovers: int,
    *,
    wait_replicas: int = 1,
    down_milliseconds: int = 5000,
    seed: int = 0,
    cluster: bool = False,
) -> Outcome:
    """Kill the primary so many times while groups move, and check what was acknowledged."""
    rng, outcome = random.Random(seed), Outcome(failovers)
    redis: WatchedRedis | ClusterServers
    if cluster:
        redis = ClusterServers(folder, replicated=(RUN,), down_milliseconds=down_milliseconds)
    else:
        redis = WatchedRedis(folder, sentinels=SENTINELS, down_milliseconds=down_milliseconds)
    processes: list[subprocess.Popen[Any]] = []
    steps = folder / "steps.jsonl"
    try:
        url = f"{redis.start().url}?wait_replicas={wait_replicas}"
        board = open_board(url)
        board.create(term=1, groups_per_step=GROUPS_PER_STEP, steps=STEPS)
        publisher = Publisher(board)
        publisher.start()
        with steps.open("wb") as log:
            for role, output in (("stages", None), ("train", log)):
                words = ("-m", "benchmarks.failover", "--role", role, "--url", url)
                processes.append(start_python(*words, stdin=subprocess.PIPE, stdout=output))
        wait_until(lambda: len(_steps(steps)) >= 3, "the first steps", RECOVERY_SECONDS)
        for number in range(failovers):
            time.sleep(rng.uniform(*QUIET_SECONDS))
            with redis.lag(LAG_SECONDS) if number % 2 == 0 else contextlib.nullcontext():
                killed = time.monotonic()
                dead = redis.kill_primary()
            redis.await_promotion(dead)
            outcome.promotions.append(time.monotonic() - killed)
            redis.revive()
            done = len(_steps(steps)) + 3
            wait_until(lambda count=done: len(_steps(steps)) >= count, "steps after a failover", RECOVERY_SECONDS)
            outcome.without_progress.append(_gap(_steps(steps), killed))
        publisher.end()
        kill(*processes)
        outcome.lost = list(_problems(board, publisher, _steps(steps)))
        outcome.unasked = redis.failovers - failovers
        outcome.steps, outcome.groups = board.last_step(), board.counts().published
    finally:
        kill(*processes)
        redis.stop()
    return outcome


def _steps(file: Path) -> list[dict[str, Any]]:
    """Return the steps whose commit was acknowledged."""
    lines = file.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def _gap(steps: list[dict[str, Any]], killed: float) -> float:
    """Return the seconds from the last acknowledged step before a kill to the first that came after it."""
    before = max(step["time"] for step in steps if step["time"] <= killed)
    return float(min(step["time"] for step in steps if step["time"] > killed) - before)


def _problems(board: Board, publisher: Publisher, steps: list[dict[str, Any]]) -> Iterator[str]:
    """Say what was acknowledged and isn't there."""
    ledger = {entry.step: entry.plan for entry in board.ledger()}
    for step in steps:
        if ledger.get(step["step"]) != step["plan"]:
            yield f"step {step['step']} was committed as {step['plan']}; the ledger has {ledger.get(step['step'])}"
    trained = Counter(group for plan in ledger.values() for group in plan["groups"])
    yield from (f"group {group} is in {times} steps" for group, times in trained.items() if times > 1)
    there = {*board.open_groups(), *trained, *(group.group_id for group in board.dropped(10_000))}
    yield from (f"group {group} was published and is gone" for group in publisher.acknowledged if group not in there)
    try:
        audit(board)
    except AssertionError as error:
        yield f"the books: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--failovers", type=int, default=50)
    parser.add_argument("--wait-replicas", type=int, default=1)
    parser.add_argument(
        "--down-milliseconds", type=int, default=5000, help="silence after which a server counts as dead"
    )
    parser.add_argument("--cluster", action="store_true", help="a Redis Cluster instead of Sentinels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--role", choices=("stages", "train"), help="used by the script itself")
    parser.add_argument("--url", default="", help="used by the script itself")
    options = parser.parse_args()
    if options.role:
        {"stages": stages, "train": train}[options.role](options.url)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(
            Path(folder),
            options.failovers,
            wait_replicas=options.wait_replicas,
            down_milliseconds=options.down_milliseconds,
            seed=options.seed,
            cluster=options.cluster,
        )
    for problem in found.lost:
        print(problem)
    rows = [
        {"seconds": name, "median": statistics.median(seconds), "longest": max(seconds)}
        for name, seconds in (("without progress", found.without_progress), ("to the promotion", found.promotions))
    ]
    facts = {"failovers": found.failovers, "steps": found.steps, "groups": found.groups, "losses": len(found.lost)}
    facts["unasked"] = found.unasked
    settings = {"wait_replicas": options.wait_replicas, "down_after_milliseconds": options.down_milliseconds}
    report("failover_cluster" if options.cluster else "failover", rows, **facts, **settings)
    return 1 if found.lost else 0


if __name__ == "__main__":
    sys.exit(main())
