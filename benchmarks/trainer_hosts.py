"""A trainer whose two ranks are on two hosts, beside one that has both: what control and network add to a step.

    python -m benchmarks.trainer_hosts       # as root: each host has a network namespace, with links that aren't shaped

A tiny model, data-parallel ranks over gloo, steps of two groups. Both trainers are up at once and train in turn, a step
each. A step is the time from the feeding of its groups until its weights are announced.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.reporting import report
from tests.integration.trainer.hosts.host_kit import TrainerOverHosts, trainer_over_hosts
from tests.integration.trainer.service_kit import make_config
from tests.kit.models import make_tiny_model
from tests.kit.namespaces import Node, namespaces
from tests.kit.redis.redis_server import RedisServer

SUBNET = "198.18.251"
"""Of the network for benchmarks (RFC 2544)."""
HERE = f"{SUBNET}.254"
WARM_STEPS = 5


def start(hosts: int, steps: int, nodes: list[Node], folder: Path, stack: contextlib.ExitStack) -> TrainerOverHosts:
    """Return a trainer that has its first weights; `stack` gets what ends it."""
    config = make_config(
        folder / "model",
        run={"steps": steps + 1},
        trainer={"ranks": 2, "hosts": hosts, "checkpoint": {"every": steps}},
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
    options = parser.parse_args()
    steps = WARM_STEPS + options.steps
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = stack.enter_context(namespaces(2, SUBNET, reachable=True))
        make_tiny_model(folder / "model", architecture="qwen3")
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
