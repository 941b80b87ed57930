"""Where the time of one hop of 4 KB goes: the processor time of clients and Redis, and Redis's time by command.

`python -m benchmarks.board_hop`. One process publishes 16,384 groups, 256 at a time, and then takes and loads them. The
times are those of a group, medians of the rounds. Those by command are by the clock, from Redis's commandstats; a
script's contains that of its commands.
"""

import argparse
import statistics
import time
from typing import Any

import redis

from benchmarks.board import CASES, make_board, payload, redis_server
from benchmarks.board_clients import redis_seconds
from benchmarks.reporting import report
from relaxd.board import NewGroup, Stage

SIZE_KB = 4
STAGES = [Stage("train", ("of_publish",), ())]


def measure(url: str) -> dict[str, float]:
    """Return microseconds a group."""
    batch, total = CASES[SIZE_KB]
    client = redis.Redis.from_url(url)
    client.flushall()
    board, data = make_board(url, STAGES, total), payload(SIZE_KB)
    groups = [NewGroup(f"g{index}", {"of_publish": data}) for index in range(total)]
    client.config_resetstat()
    found, begun, of_redis = {}, time.process_time(), redis_seconds(client)
    for first in range(0, total, batch):
        board.publish(term=1, groups=groups[first : first + batch], cursor=first)
    found["client: publish"] = time.process_time() - begun
    found["Redis: publish"] = redis_seconds(client) - of_redis
    begun, of_redis, taken = time.process_time(), redis_seconds(client), 0
    while taken < total:
        deliveries = board.take("train", "trainer", count=batch, block_seconds=0.5)
        taken += len(board.load(deliveries, ["of_publish"]))
    found["client: take and load"] = time.process_time() - begun
    found["Redis: take and load"] = redis_seconds(client) - of_redis
    facts: Any = client.info("commandstats")
    for name, stats in facts.items():
        found[f"{name.removeprefix('cmdstat_').upper()}, by the clock"] = stats["usec"] / 1e6
    board.close()
    return {name: 1e6 * seconds / total for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often it is measured; the median counts")
    options = parser.parse_args()
    with redis_server(append_only=False) as url:
        rounds = [measure(url) for _ in range(options.rounds)]
    medians = {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in rounds[0]}
    rows = [{"what": name, "µs a group": round(value, 2)} for name, value in medians.items() if value >= 0.1]
    report("board_hop", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
