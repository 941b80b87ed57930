"""A trainer whose two ranks are on two hosts: what control and network add to a step, and how soon it trains again.

    python -m benchmarks.trainer_hosts       # as root: each host has a network namespace, with links that aren't shaped
    python -m benchmarks.trainer_hosts --faults 3

A tiny model, data-parallel ranks over gloo, steps of two groups. Beside it a trainer has both ranks on one host; both
are up at once and train in turn, a step each. A step is the time from the feeding of its groups until its weights are
announced.

With --faults the trainer of two hosts goes through each fault so many times, in turn. Times run from the fault until
the last version is announced again, and until the next step is committed. The books are audited at the end.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.reporting import report
from tests.integration.trainer.hosts.host_kit import Host, TrainerOverHosts, trainer_over_hosts
from tests.integration.trainer.service_kit import make_config
from tests.kit.models import make_tiny_model
from tests.kit.namespaces import Node, namespaces
from tests.kit.redis.redis_server import RedisServer
from tests.kit.waiting import wait_until

SUBNET = "198.18.251"
"""Of the network for benchmarks (RFC 2544)."""
HERE = f"{SUBNET}.254"
WARM_STEPS = 5
REST_SECONDS = 20.0
"""Pause before a fault, in which spare ranks load their code."""
GOALS = {
    "a rank is killed": 10.0,
    "a host is killed, its service is back after 3 s": 15.0,
    "a cable is out for 15 s": 25.0,
}
"""Seconds in which it should train again."""


def break_host(host: Host, fault: str) -> None:
    """Have a fault on a host, until its end."""
    assert host.node is not None
    if fault == "a rank is killed":
        psutil.Process(host.rank_pids()[0]).kill()
    elif fault == "a cable is out for 15 s":
        host.node.cut()
        time.sleep(15)
        host.node.mend()
    else:
        host.kill()
        time.sleep(3)
        host.start()


def measure_faults(run: TrainerOverHosts, times: int) -> None:
    """Print a row for each fault."""
    found: dict[str, list[tuple[float, float]]] = {fault: [] for fault in GOALS}
    load = os.getloadavg()[0]
    run.train(WARM_STEPS)
    for fault in times * list(GOALS):
        (host,), before = run.hosts, run.term
        time.sleep(REST_SECONDS)
        begun = time.monotonic()
        break_host(host, fault)
        run.coordinator.wait(lambda: run.coordinator.announced[-1][0] > before)  # noqa: B023
        announced = time.monotonic() - begun
        run.term = run.coordinator.announced[-1][0]
        run.train(1)
        found[fault].append((announced, time.monotonic() - begun))
        print(f"{fault}: {announced:.1f} s, {found[fault][-1][1]:.1f} s (load {os.getloadavg()[0]:.1f})", flush=True)
        run.train(2)
        wait_until(lambda: len(host.rank_pids()) == 1, "a heartbeat with its rank", 20)  # noqa: B023
    run.check_books()
    rows = [
        {
            "fault": fault,
            "goal_s": GOALS[fault],
            "announced_again_s": sorted(round(one, 1) for one, _ in pairs),
            "trains_again_s": sorted(round(one, 1) for _, one in pairs),
        }
        for fault, pairs in found.items()
    ]
    report("trainer-hosts-faults", rows, times=times, load_before=load)


def start(
    hosts: int, steps: int, nodes: list[Node], folder: Path, stack: contextlib.ExitStack, checkpoint_every: int = 0
) -> TrainerOverHosts:
    """Return a trainer that has its first weights; `stack` gets what ends it."""
    config = make_config(
        folder / "model",
        run={"steps": steps + 1},
        trainer={"ranks": 2, "hosts": hosts, "checkpoint": {"every": checkpoint_every or steps}},
        board={"max_staleness": 0, "lease_seconds": 30},
    )
    own = folder / f"hosts-{hosts}"
    own.mkdir()
    server = RedisServer(own, options=("--bind", "127.0.0.1", HERE, "--protected-mode", "no")).start()
    stack.callback(server.kill)
    url = server.url.replace("127.0.0.1", HERE)
    run = stack.enter_context(trainer_over_hosts(config, url, own / "run", nodes=nodes[:hosts], host=HERE))
    run.begin()
    return run


def main() -> None:
    """Print a row for each number of hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=0, help="times that each fault is had, instead")
    options = parser.parse_args()
    steps = WARM_STEPS + options.steps
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = stack.enter_context(namespaces(2, SUBNET, reachable=True))
        make_tiny_model(folder / "model", architecture="qwen3")
        if options.faults:
            measure_faults(start(2, 1000, nodes, folder, stack, checkpoint_every=2), options.faults)
            return
        runs = {hosts: start(hosts, steps, nodes, folder, stack) for hosts in seconds}
        for step in range(steps):
            for hosts in (1, 2) if step % 2 else (2, 1):
                began = time.monotonic()
                runs[hosts].train(1)
                seconds[hosts].append(time.monotonic() - began)
    medians = {hosts: statistics.median(found[WARM_STEPS:]) for hosts, found in seconds.items()}
    rows = [
        {"hosts": hosts, "step_ms": 1e3 * median, "steps_per_s": 1 / median, "of one host": medians[1] / median}
        for hosts, median in medians.items()
    ]
    report("trainer-hosts", rows, steps=options.steps)


if __name__ == "__main__":
    main()
