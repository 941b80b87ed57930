"""The board's cost of crash safety: no append-only file, one synced every second, one synced on every write.

`python -m benchmarks.board_durability [--folder DISK]`. The end-to-end case of `benchmarks.board` (publish -> three
stages -> step ledger, every stage writing the bytes) on one Redis whose append-only file is switched by CONFIG SET,
interleaved so that all three run under the same conditions. "everysec" (the setting of `relaxd up` and of the compose
files) loses nothing when any process dies, and at most a second when the host does; "always" loses nothing then,
either. The file is rewritten before each measurement, and its size reported: bytes on disk for bytes moved.
"""

import argparse
import contextlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from benchmarks.board import CASES, STAGES, measure_board, measure_latency
from benchmarks.reporting import report
from relaxd.local.embedded_redis import server_command, url, wait_until_up
from relaxd.process.ports import free_port

MODES = ("off", "everysec", "always")
SECONDS = 60.0
"""Deadline for Redis to rewrite its file."""


@contextlib.contextmanager
def redis_on(folder: Path) -> Iterator[str]:
    """Start a Redis with its files below `folder`."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="relaxd-durability-") as data:
        port = free_port()
        process = subprocess.Popen(server_command(Path(data), port), stdout=subprocess.DEVNULL)
        try:
            wait_until_up(url(port), seconds=10, ended=lambda: process.poll() is not None)
            yield url(port)
        finally:
            process.terminate()
            process.wait(timeout=10)


def switch(client: Any, mode: str) -> None:
    """Empty Redis and switch the append-only file's mode."""
    client.flushall()
    client.config_set("appendonly", "no")
    if mode == "off":
        return
    client.config_set("appendfsync", mode)
    client.config_set("appendonly", "yes")
    deadline = time.monotonic() + SECONDS
    while (info := client.info("persistence"))["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"Redis did not write its append-only file within {SECONDS:g} s")
        time.sleep(0.05)


def aof_bytes(client: Any) -> int:
    """Return the size of the append-only file, 0 without one."""
    return int(client.info("persistence").get("aof_current_size", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; the median counts")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 64, 256], choices=list(CASES), help="KB a group")
    parser.add_argument("--workers", type=int, default=1, help="processes a stage")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure: not a tmpfs")
    options = parser.parse_args()
    rows = []
    with redis_on(options.folder) as redis_url, redis.Redis.from_url(redis_url, socket_timeout=SECONDS) as client:
        for size_kb in options.sizes:
            rates: dict[str, list[float]] = {mode: [] for mode in MODES}
            written: dict[str, list[float]] = {mode: [] for mode in MODES}
            for number in range(options.rounds):
                for mode in MODES if number % 2 == 0 else MODES[::-1]:
                    switch(client, mode)
                    before = aof_bytes(client)
                    rates[mode].append(measure_board(redis_url, size_kb, STAGES, options.workers))
                    written[mode].append((aof_bytes(client) - before) / (CASES[size_kb][1] * size_kb * 1024))
            rows += [row(size_kb, mode, rates, written) for mode in MODES]
        latencies = {}
        for mode in MODES:
            switch(client, mode)
            p50, p99 = measure_latency(redis_url)
            latencies[mode] = {"p50": round(p50, 3), "p99": round(p99, 3)}
    report("board-durability", rows, rounds=options.rounds, workers=options.workers, hop_latency_ms=latencies)


def row(size_kb: int, mode: str, rates: dict[str, list[float]], written: dict[str, list[float]]) -> dict[str, Any]:
    """Return a row of the table: medians, and the median of the ratios within each round."""
    ratios = [rate / without for rate, without in zip(rates[mode], rates["off"], strict=True)]
    rate = statistics.median(rates[mode])
    return {
        "KB": size_kb,
        "append-only file": mode,
        "groups/s": round(rate),
        "MB/s": round(rate * size_kb / 1024, 1),
        "of the speed without": round(statistics.median(ratios), 2),
        "file bytes / group byte": round(statistics.median(written[mode]), 2) if mode != "off" else "-",
    }


if __name__ == "__main__":
    main()
