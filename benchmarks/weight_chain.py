"""Weights to engines on hosts with slow links: a star, gloo's broadcast and a chain, beside the time of a link.

    python -m benchmarks.weight_chain        # as root: each member has a network namespace, whose link is shaped

One trainer and 3, 7 and 15 engines, `gloo` and `gloo_chain` of weights.transport as a run has them, with two buckets on
their way. In a star the trainer sends to each engine. The least possible is the time that a link takes for the weights
once.
"""

import argparse
import ctypes
import multiprocessing
import os
import statistics
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reporting import report
from relaxd.weights.buckets import checksums
from relaxd.weights.weight_group import Rendezvous, Transport, WeightGroup, host_store
from tests.kit.namespaces import INTERFACE, Node, namespaces

SECONDS = 300.0
PORT = 29519
IN_FLIGHT = 2
WAYS: tuple[Transport | str, ...] = ("star", "gloo", "gloo_chain")


def enter(node: Node) -> None:
    """Move this process to a node."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{node.name}", os.O_RDONLY)
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter {node.name}")


def member(rank: int, nodes: list[Node], options: argparse.Namespace, results: Any) -> None:
    """Be the trainer (rank 0) or an engine: take each way several times."""
    enter(nodes[rank])
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    store = host_store(nodes[0].address, PORT, SECONDS) if rank == 0 else None
    client = dist.TCPStore(nodes[0].address, PORT, None, is_master=False, timeout=timeout, wait_for_workers=False)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout, gloo._devices = timeout, [dist.ProcessGroupGloo.create_device(hostname=nodes[rank].address)]
    plain: Any = dist.ProcessGroupGloo(dist.PrefixStore("plain", client), rank, len(nodes), gloo)
    groups = {}
    for way in WAYS[1:]:
        place = Rendezvous(
            transport=way,  # type: ignore[arg-type]
            store_host=nodes[0].address,
            store_port=PORT,
            name=way,
            world_size=len(nodes),
        )
        groups[way] = WeightGroup(place, rank)
        groups[way].connect(SECONDS)
    buckets = [
        torch.empty(options.bucket_mib << 20, dtype=torch.uint8) for _ in range(options.mib // options.bucket_mib)
    ]
    for turn in range(options.times):
        torch.manual_seed(turn)
        sent = {
            str(number): torch.randint(0, 256, bucket.shape, dtype=torch.uint8) for number, bucket in enumerate(buckets)
        }
        for way in WAYS:
            for bucket, source in zip(buckets, sent.values(), strict=True):
                bucket.copy_(source) if rank == 0 else bucket.zero_()
            plain.barrier().wait(timeout)
            began = time.monotonic()
            if way == "star":
                for bucket in buckets:
                    peers = range(1, len(nodes)) if rank == 0 else [0]
                    for work in [(plain.recv if rank else plain.send)([bucket], peer, 1) for peer in peers]:
                        work.wait(timeout)
            else:
                flying: list[Any] = []
                for number, bucket in enumerate(buckets):
                    if number >= IN_FLIGHT:
                        flying[number - IN_FLIGHT].wait()
                    flying.append(groups[way].start_broadcast(bucket, 0, SECONDS))
                for transfer in flying:
                    transfer.wait()
            plain.barrier().wait(timeout)
            if rank == 0:
                results.put((way, time.monotonic() - began))
            received = {str(number): bucket for number, bucket in enumerate(buckets)}
            assert checksums(received) == checksums(sent), f"rank {rank}: other bits by {way}"
    for group in groups.values():
        group.abort()
    plain.barrier().wait(timeout)
    del store


def measure(engines: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the median seconds of each way to so many engines."""
    with namespaces(engines + 1) as nodes:
        switch = nodes[0].name.rsplit("-", 1)[0] + "-switch"
        shape = ["root", "tbf", "rate", f"{options.mbit}mbit", "burst", "256kb", "latency", "200ms"]
        for index, node in enumerate(nodes):
            for place in ((node.name, INTERFACE), (switch, f"port{index}")):
                subprocess.run(["tc", "-n", place[0], "qdisc", "add", "dev", place[1], *shape], check=True, timeout=60)
        context = multiprocessing.get_context("fork")  # torch is imported once
        results = context.Queue()
        processes = [
            context.Process(target=member, args=(rank, nodes, options, results), daemon=True)
            for rank in range(len(nodes))
        ]
        for process in processes:
            process.start()
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.times * len(WAYS)):
            way, took = results.get(timeout=SECONDS)
            seconds[way].append(took)
        for process in processes:
            process.join(60)
    least = (options.mib << 23) / options.mbit / 1e6
    medians = {way: statistics.median(took) for way, took in seconds.items()}
    ratios = {f"{way} / least": took / least for way, took in medians.items()}
    return {"engines": engines, "least_s": least, **{f"{way}_s": took for way, took in medians.items()}, **ratios}


def main() -> None:
    """Print a row for each number of engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[3, 7, 15])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for engines in options.engines:
        rows.append(measure(engines, options))
        print(rows[-1], flush=True)
    report("weight-chain", rows, mib=options.mib, bucket_mib=options.bucket_mib, mbit=options.mbit, times=options.times)


if __name__ == "__main__":
    Path("/run/netns").mkdir(exist_ok=True)
    main()
