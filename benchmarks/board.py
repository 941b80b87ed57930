"""Throughput and latency of the board, compared with raw Redis Streams and TransferQueue on the same bytes.

`python -m benchmarks.board`. Three measurements, interleaved so that all run under the same conditions:

- end to end, publish -> three stages -> step ledger, every stage reading and writing the group's bytes, with 1 and with
  4 processes a stage; compared with XADD / XREADGROUP / XACK of the same bytes, batch and number of round trips;
- one hop, from a producer to a consumer process; compared with TransferQueue 0.1.11's put and get (the `bench` extra;
  skipped with a note if it isn't installed);
- the latency of a hop, unloaded: from before the commit to after the columns are loaded.

Redis keeps no append-only file, unless --append-only: TransferQueue keeps nothing on disk either.
Goals: >= 60 % of raw Redis at 64 KB and above; >= 2 x TransferQueue at 4 KB and >= 1 x at 256 KB and above;
p50 <= 2 ms.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks.reporting import report
from benchmarks.transfer_queue import TransferQueue, installed
from relaxd.board import Board, NewGroup, Stage
from relaxd.config import BoardConfig
from relaxd.local.embedded_redis import given_url, server_command, url, wait_until_up
from relaxd.process.upkeep import freeze_objects

CASES = {4: (256, 16384), 64: (64, 2048), 256: (16, 512), 1024: (4, 128)}
"""By group size in KB: groups per batch, groups in total."""
HOPS = ("publish", "one", "two", "three")
STAGES = [Stage(name, (f"of_{before}",), (f"of_{name}",)) for before, name in itertools.pairwise(HOPS)]
STAGES.append(Stage("train", ("of_three",), ()))
SECONDS = 120.0
"""Deadline of a measurement."""


@contextlib.contextmanager
def redis_server(append_only: bool) -> Iterator[str]:
    """Yield the Redis of REDIS_URL, by default a new one."""
    if given := given_url():
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        port = 7391
        command = [*server_command(Path(folder), port), "--appendonly", "yes" if append_only else "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_until_up(url(port), seconds=10, ended=lambda: process.poll() is not None)
            yield url(port)
        finally:
            process.terminate()
            process.wait(timeout=10)


def payload(size_kb: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, size_kb * 1024, dtype=np.uint8)


class Clock:
    """Starts all processes of a measurement together, and takes the time until one of them stops it."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready = context.Barrier(processes + 1)
        self._end = context.Value("d", 0.0)

    def wait(self) -> float:
        """Wait until all processes are ready; return the time."""
        self._ready.wait(SECONDS)
        return time.perf_counter()

    def stop(self) -> None:
        """Stop the clock. Linux's monotonic clock is the same in all processes."""
        self._end.value = time.perf_counter()

    def seconds_since(self, begun: float) -> float:
        return float(self._end.value - begun)


def in_processes(roles: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> float:
    """Run every role in its own process; return the seconds from when all are ready until one stops the clock."""
    clock = Clock(len(roles))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=role, args=(clock, *arguments), daemon=True) for role, arguments in roles]
    for process in processes:
        process.start()
    begun = clock.wait()
    for process in processes:
        process.join(SECONDS)
    for process in processes:
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError(f"a process of the benchmark did not end well (exit code {process.exitcode})")
    return clock.seconds_since(begun)


# --- the board ------------------------------------------------------------------------------------------------------


def make_board(redis_url: str, stages: list[Stage], total: int) -> Board:
    limits = BoardConfig(lease_seconds=300, high_water_bytes=64 << 30)
    board = Board(redis_url, "benchmark", stages, limits, timeout_seconds=30)
    board.create(term=1, groups_per_step=total, steps=1)
    board.set_gate(term=1, oldest_version=0, open=True)
    return board


def board_publish(clock: Clock, redis_url: str, stages: list[Stage], total: int, batch: int, size_kb: int) -> None:
    board, data = make_board(redis_url, stages, total), payload(size_kb)
    groups = [NewGroup(f"g{i}", {"of_publish": data}) for i in range(total)]
    freeze_objects()  # as the coordinator does
    clock.wait()
    for first in range(0, total, batch):
        board.publish(term=1, groups=groups[first : first + batch], cursor=first)


def board_stage(
    clock: Clock, redis_url: str, stages: list[Stage], number: int, name: str, total: int, batch: int
) -> None:
    """Run a stage until the ledger is complete."""
    board = make_board(redis_url, stages, total)
    stage = stages[number]
    clock.wait()
    while not board.last_step():
        deliveries = board.take(stage.name, name, count=batch, block_seconds=0.05)
        columns = board.load(deliveries, stage.needs)
        board.commit(
            [
                (delivery, {stage.writes[0]: found[stage.needs[0]]})
                for delivery, found in zip(deliveries, columns, strict=True)
                if found is not None
            ]
        )


def board_train(clock: Clock, redis_url: str, stages: list[Stage], total: int, batch: int) -> None:
    board = make_board(redis_url, stages, total)
    stage = stages[-1]
    term = board.new_trainer_term()
    freeze_objects()  # as a trainer does
    clock.wait()
    trained: list[str] = []
    while len(trained) < total:
        deliveries = board.take("train", "trainer", count=batch, block_seconds=0.5)
        columns = board.load(deliveries, stage.needs)
        trained += [d.group_id for d, found in zip(deliveries, columns, strict=True) if found is not None]
    if len(stages) == 1:
        clock.stop()  # a hop ends with the columns loaded, as TransferQueue's get does
    board.commit_step(term=term, step=1, plan={"groups": trained}, metrics={})
    if len(stages) > 1:
        clock.stop()


def measure_board(redis_url: str, size_kb: int, stages: list[Stage], workers: int) -> float:
    """Return groups per second from publish to ledger."""
    batch, total = CASES[size_kb]
    redis.Redis.from_url(redis_url).flushall()
    board = make_board(redis_url, stages, total)
    roles: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (board_publish, (redis_url, stages, total, batch, size_kb)),
        (board_train, (redis_url, stages, total, batch)),
    ]
    for number in range(len(stages) - 1):
        for worker in range(workers):
            roles.append((board_stage, (redis_url, stages, number, f"worker-{worker}", total, batch)))
    seconds = in_processes(roles)
    counts = board.counts()
    counts.check()
    if counts.trained != total:
        raise RuntimeError(f"{counts.trained} of {total} groups arrived")
    return total / seconds


# --- raw Redis ------------------------------------------------------------------------------------------------------


def raw_publish(clock: Clock, redis_url: str, total: int, batch: int, size_kb: int) -> None:
    client, data = redis.Redis.from_url(redis_url, protocol=2), payload(size_kb).tobytes()
    clock.wait()
    for _ in range(0, total, batch):
        add(client, "raw:0", [data] * batch)


def raw_stage(clock: Clock, redis_url: str, number: int, name: str, total: int, batch: int) -> None:
    """Read from one stream, add to the next, acknowledge: three round trips, as in a stage of the board."""
    client = redis.Redis.from_url(redis_url, protocol=2)
    clock.wait()
    while not client.exists("raw:ledger"):
        ids, found = read(client, f"raw:{number}", name, batch, 50)
        if ids:
            add(client, f"raw:{number + 1}", found)
            client.xack(f"raw:{number}", "group", *ids)


def raw_train(clock: Clock, redis_url: str, number: int, total: int, batch: int) -> None:
    """Read and acknowledge everything; write the ledger's entry at the end."""
    client = redis.Redis.from_url(redis_url, protocol=2)
    clock.wait()
    got = 0
    while got < total:
        ids, found = read(client, f"raw:{number}", "trainer", batch, 500)
        if ids:
            client.xack(f"raw:{number}", "group", *ids)
        got += len(found)
    client.xadd("raw:ledger", {"groups": str(got)})
    clock.stop()


def add(client: redis.Redis, stream: str, data: list[bytes]) -> None:
    with client.pipeline(transaction=False) as pipe:
        for one in data:
            pipe.xadd(stream, {"d": one})
        pipe.execute()


def read(client: Any, stream: str, name: str, batch: int, block: int) -> tuple[list[bytes], list[bytes]]:
    reply = client.xreadgroup("group", name, {stream: ">"}, count=batch, block=block)
    entries = reply[0][1] if reply else []
    return [entry_id for entry_id, _ in entries], [fields[b"d"] for _, fields in entries]


def measure_raw(redis_url: str, size_kb: int, hops: int, workers: int) -> float:
    """Return groups per second through `hops` streams."""
    batch, total = CASES[size_kb]
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    for hop in range(hops):
        client.xgroup_create(f"raw:{hop}", "group", id="0", mkstream=True)
    roles: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (raw_publish, (redis_url, total, batch, size_kb)),
        (raw_train, (redis_url, hops - 1, total, batch)),
    ]
    for number in range(hops - 1):
        for worker in range(workers):
            roles.append((raw_stage, (redis_url, number, f"worker-{worker}", total, batch)))
    return total / in_processes(roles)


# --- latency --------------------------------------------------------------------------------------------------------


def latency_consumer(clock: Clock, redis_url: str, stages: list[Stage], total: int, times: Any) -> None:
    board = make_board(redis_url, stages, total)
    clock.wait()
    for _ in range(total):
        deliveries = []
        while not deliveries:
            deliveries = board.take("train", "trainer", count=1, block_seconds=5)
        board.load(deliveries, stages[-1].needs)
        times.put(time.perf_counter())


def latency_producer(clock: Clock, redis_url: str, stages: list[Stage], total: int, times: Any, out: Any) -> None:
    """Commit one group at a time, each after the previous one has arrived."""
    board = make_board(redis_url, stages, total)
    data = payload(4)
    board.publish(term=1, groups=[NewGroup(f"g{i}", {"of_publish": data}) for i in range(total)])
    deliveries = board.take("one", "worker", count=total, block_seconds=5)
    clock.wait()
    for delivery in deliveries:
        time.sleep(0.003)  # the consumer is waiting by then
        begun = time.perf_counter()
        board.commit([(delivery, {"of_one": data})])
        out.put(times.get(timeout=SECONDS) - begun)
    clock.stop()


def measure_latency(redis_url: str, total: int = 300) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds."""
    stages = [STAGES[0], Stage("train", ("of_one",), ())]
    redis.Redis.from_url(redis_url).flushall()
    make_board(redis_url, stages, total)
    context = multiprocessing.get_context("spawn")
    times, out = context.Queue(), context.Queue()
    in_processes(
        [
            (latency_consumer, (redis_url, stages, total, times)),
            (latency_producer, (redis_url, stages, total, times, out)),
        ]
    )
    found = [1000 * out.get(timeout=SECONDS) for _ in range(total)]
    return float(np.percentile(found, 50)), float(np.percentile(found, 99))


# --- report ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; the median counts")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(CASES), choices=list(CASES), help="group sizes in KB"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="processes a stage")
    parser.add_argument("--append-only", action="store_true", help="with an append-only file, synced every second")
    options = parser.parse_args()
    queue = TransferQueue() if installed() else None
    rows = []
    direct = [Stage("train", ("of_publish",), ())]
    with redis_server(options.append_only) as redis_url:
        for size_kb in options.sizes:
            batch, total = CASES[size_kb]
            for workers in options.workers:
                board, raw = [], []
                for _ in range(options.rounds):
                    raw.append(measure_raw(redis_url, size_kb, len(STAGES), workers))
                    board.append(measure_board(redis_url, size_kb, STAGES, workers))
                name = f"publish, 3 stages, ledger; {workers} a stage"
                rows.append(row(name, size_kb, board, {"raw Redis": raw}))
            board, raw, queued = [], [], []
            for _ in range(options.rounds):
                raw.append(measure_raw(redis_url, size_kb, 1, 1))
                board.append(measure_board(redis_url, size_kb, direct, 1))
                if queue:
                    queued.append(queue.measure(payload(size_kb), batch, total))
            rows.append(row("one hop", size_kb, board, {"raw Redis": raw, "TransferQueue": queued}))
        p50, p99 = measure_latency(redis_url)
    if queue:
        queue.close()
    report(
        "board",
        rows,
        rounds=options.rounds,
        append_only=options.append_only,
        hop_latency_ms={"p50": round(p50, 3), "p99": round(p99, 3)},
        transfer_queue="0.1.11" if queue else "not installed (extra: bench)",
    )


def row(name: str, size_kb: int, board: list[float], others: dict[str, list[float]]) -> dict[str, Any]:
    """Return a row of the table: medians, and the median of the ratios of neighbouring measurements."""
    rate = statistics.median(board)
    result: dict[str, Any] = {
        "what": name,
        "KB": size_kb,
        "batch": CASES[size_kb][0],
        "board groups/s": round(rate),
        "board MB/s": round(rate * size_kb / 1024, 1),
    }
    for other in ("raw Redis", "TransferQueue"):
        rates = others.get(other)
        result[f"{other} groups/s"] = round(statistics.median(rates)) if rates else "-"
        ratios = [ours / theirs for ours, theirs in zip(board, rates or [], strict=False)]
        result[f"board / {other}"] = round(statistics.median(ratios), 2) if ratios else "-"
    return result


if __name__ == "__main__":
    main()
