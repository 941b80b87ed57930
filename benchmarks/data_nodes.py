"""Payloads over data nodes: bytes per second, and what the busiest server does for them.

`python -m benchmarks.data_nodes`. Clients, each a process with a run of its own, commit groups with four columns of
2 MiB, load them again and drop the groups, whose payloads a sweep frees: with all bytes on the board's Redis, and over
1, 2 and 3 data nodes. All servers and clients share the processors, so bytes per second say little about more machines.
What the busiest server needs does: its processor time per GB, its operations per second, its share of the bytes.
What it moves in a second of its processor time, both directions together, is the limit of a node whose one thread has a
core of its own; its operations are of at most 1 MiB each.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import redis

from benchmarks.board import Clock, in_processes
from benchmarks.reporting import report
from relaxd.board import Board, DropReason, NewGroup, Stage
from relaxd.config import BoardConfig
from tests.kit.redis.redis_server import RedisServer

COLUMNS = tuple(f"column_{number}" for number in range(4))
COLUMN_BYTES = 2 << 20
STAGES = (Stage("write", ("prompt",), COLUMNS), Stage("read", COLUMNS, ("done",)), Stage("train", ("done",), ()))


def client(clock: Clock, url: str, data_urls: tuple[str, ...], run_id: str, groups: int) -> None:
    """Commit, load and drop groups, one after the other."""
    limits = BoardConfig(max_staleness=1000, lease_seconds=300, high_water_bytes=64 << 30, data_urls=data_urls)
    board = Board(url, run_id, STAGES, limits, timeout_seconds=30)
    board.create(term=1, groups_per_step=groups, steps=1)
    board.set_gate(term=1, oldest_version=0, open=True)
    columns = {name: np.random.default_rng(0).integers(0, 255, COLUMN_BYTES, np.uint8) for name in COLUMNS}
    board.publish(term=1, groups=[NewGroup(f"g{number}", {"prompt": "?"}) for number in range(groups)])
    deliveries = board.take("write", run_id, count=groups, block_seconds=5)
    clock.wait()
    for delivery in deliveries:
        assert board.commit([(delivery, columns)]) == [True]
        assert board.load([delivery], COLUMNS)[0] is not None
        assert board.drop_groups([delivery.group_id], term=1, reason=DropReason.RUN_ENDED) == 1
        board.sweep(term=1)
    clock.stop()


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[RedisServer]]:
    """Yield so many servers."""
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = []
        for number in range(count):
            (Path(folder) / str(number)).mkdir()
            started.append(RedisServer(Path(folder) / str(number)).start())
            stack.callback(started[-1].stop)
        yield started


def measure(nodes: int, clients: int, groups: int) -> dict[str, float]:
    """Return what one round takes."""
    with servers(1 + nodes) as (board, *data):
        urls = tuple(server.url for server in data)
        handles: list[Any] = [redis.Redis.from_url(server.url) for server in (data or [board])]
        before = [handle.info() for handle in handles]
        arguments = [(board.url, urls, f"run-{number}", groups) for number in range(clients)]
        seconds = in_processes([(client, one) for one in arguments])
        after = [handle.info() for handle in handles]
    moved = [
        sum(b[name] - a[name] for name in ("total_net_input_bytes", "total_net_output_bytes"))
        for a, b in zip(before, after, strict=True)
    ]
    busiest = int(np.argmax(moved))
    first, last = before[busiest], after[busiest]
    cpu = sum(last[name] - first[name] for name in ("used_cpu_user", "used_cpu_sys"))
    operations = last["total_commands_processed"] - first["total_commands_processed"]
    return {
        "MB/s": sum(moved) / seconds / 1e6,
        "busiest: share": moved[busiest] / sum(moved),
        "busiest: operations/s": operations / seconds,
        "busiest: CPU s per GB of all": cpu / (sum(moved) / 1e9),
        "busiest: GB per CPU s": moved[busiest] / 1e9 / cpu,
        "busiest: operations per CPU s": operations / cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often; the median counts")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--groups", type=int, default=60, help="groups of each client, 8 MiB each")
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    found: dict[int, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for nodes in range(4):
            found.setdefault(nodes, []).append(measure(nodes, options.clients, options.groups))
            time.sleep(0.5)
    rows = [
        {"data nodes": nodes or "none"} | {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for nodes, rounds in found.items()
    ]
    report("data_nodes", rows, clients=options.clients, groups=options.groups, rounds=options.rounds)


if __name__ == "__main__":
    main()
