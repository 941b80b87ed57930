"""Reading a step into the ranks of one data-parallel index: each rank by itself, or one that shares with the others.

`python -m benchmarks.step_reading`. Four processes, on one machine with Redis, read the groups of a step that wait on a
real board, as the trainer's ranks do: all of them the same groups. "each" is what they did before; with "one", the
first reads, and gloo carries the columns to the others. Time ends when all ranks have all groups. The network between
ranks is the loopback here, and all processes share the processors, so the bytes and the processor time of Redis say
more about several machines than the seconds do.
"""

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis
import torch.distributed as dist

from benchmarks.board import SECONDS, Clock, in_processes
from benchmarks.reporting import report
from relaxd.board import TRAIN, Board, Delivery, stages_for
from relaxd.config import RunConfig
from services.trainer.batch.groups import check_group
from services.trainer.loop.training_commands import LOADED_TOGETHER
from services.trainer.megatron.channels import ModelParallelChannel
from tests.integration.trainer.service_kit import RUN_ID, Feeder, make_config
from tests.kit.ports import free_port
from tests.kit.redis.redis_server import RedisServer

SAMPLES = 8
CASES = {8192: 64, 65536: 8}
"""By tokens of an answer: groups."""
WAYS = ("each", "one")


def rank(clock: Clock, number: int, ranks: int, port: int, one: bool, url: str, config: RunConfig, step: Any) -> None:
    """Read all groups on one rank."""
    timeout = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=number == 0, timeout=timeout)
    dist.init_process_group("gloo", rank=number, world_size=ranks, store=store, timeout=timeout)
    channel = ModelParallelChannel(0, SECONDS)
    share: Callable[[Callable[[], Any]], Any] = channel.share if one else lambda read: read()
    board = Board(url, RUN_ID, stages_for(config), config.board)
    groups: dict[str, Any] = {}
    clock.wait()
    for begin in range(0, len(step), LOADED_TOGETHER):
        groups |= share(partial(read, board, step[begin : begin + LOADED_TOGETHER]))
    assert len(groups) == len(step)
    dist.barrier()
    clock.stop()
    dist.destroy_process_group()


def read(board: Board, deliveries: Sequence[Delivery]) -> dict[str, Any]:
    """Return the checked columns of some groups."""
    names = board.needs(TRAIN)
    loaded = zip(deliveries, board.load(deliveries, names), strict=True)
    return {one.group_id: check_group(one.group_id, columns or {}, names).columns for one, columns in loaded}


def measure(server: RedisServer, config: RunConfig, step: Sequence[Delivery], ranks: int, way: str) -> dict[str, float]:
    """Return what one reading of the step takes."""
    port = free_port()
    with redis.Redis.from_url(server.url) as client:
        before: dict[str, Any] = client.info()
        jobs = [(rank, (number, ranks, port, way == "one", server.url, config, step)) for number in range(ranks)]
        seconds = in_processes(jobs)
        after: dict[str, Any] = client.info()
    cpu = sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys"))
    sent = (after["total_net_output_bytes"] - before["total_net_output_bytes"]) / 1e6
    return {"seconds": seconds, "Redis sends, MB": sent, "Redis CPU, s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often; the median counts")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    rows = []
    for tokens, groups in CASES.items():
        settings = {"rollout": {"samples_per_prompt": SAMPLES}, "trainer": {"groups_per_step": groups}}
        config = make_config(Path("model"), **settings, board={"lease_seconds": 300})
        with TemporaryDirectory() as folder:
            server = RedisServer(Path(folder)).start()
            feeder = Feeder(server.url, config)
            for _ in range(groups):
                feeder.feed(1, 0, length=tokens)
            step = feeder.board.take(TRAIN, "benchmark", count=groups, block_seconds=5.0)
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(options.rounds):
                for way in WAYS:
                    found[way].append(measure(server, config, step, options.ranks, way))
            feeder.board.close()
            server.stop()
        for way, rounds in found.items():
            medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            rows.append({"tokens an answer": tokens, "groups": groups, "who reads": way, **medians})
    report("step_reading", rows, ranks=options.ranks, samples=SAMPLES, rounds=options.rounds)


if __name__ == "__main__":
    main()
