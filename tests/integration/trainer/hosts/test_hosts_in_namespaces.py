"""A trainer over several hosts with networks of their own: parallel layouts, a cut cable."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.hosts.host_kit import TrainerOverHosts, trainer_over_hosts
from tests.integration.trainer.service_kit import Receiver, make_config
from tests.kit.models import make_tiny_model
from tests.kit.namespaces import NamespacesUnavailable, namespaces
from tests.kit.redis.redis_server import RedisServer
from tests.kit.waiting import PATIENCE

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]
SUBNET = f"198.18.{os.getpid() % 250}"
"""Of the network for benchmarks (RFC 2544)."""
HERE = f"{SUBNET}.254"
LAYOUTS = {
    "dp2": (2, 2, {}),
    "pp2": (2, 2, {"pipeline_parallel": 2}),
    "ep2": (2, 2, {"expert_parallel": 2}),
    "tp2 dp2": (2, 4, {"tensor_parallel": 2}),
    "dp3": (3, 3, {}),
}
"""Hosts, ranks and parallel sizes."""

Start = Callable[..., AbstractContextManager[TrainerOverHosts]]


@pytest.fixture
def start(redis_server: Callable[..., RedisServer], tmp_path: Path) -> Iterator[Start]:
    """Yield `start(model, hosts, **trainer)`: a trainer over namespaces, or with one host on this machine."""
    try:
        with namespaces(3, SUBNET, reachable=True) as nodes:
            for node in nodes:
                node.add_interface("eth1", "10.77.0.1/24")
            server = redis_server(append_only=False, options=("--bind", "127.0.0.1", HERE, "--protected-mode", "no"))

            def make(
                model: Path, hosts: int, environments: Sequence[dict[str, str]] = (), **trainer: Any
            ) -> AbstractContextManager[TrainerOverHosts]:
                config = make_config(
                    model,
                    run={"steps": 10},
                    trainer={"hosts": hosts, "checkpoint": {"every": 2}, **trainer},
                    board={"max_staleness": 0, "lease_seconds": 30},
                )
                folder = tmp_path / f"run-{hosts}"
                if hosts == 1:
                    return trainer_over_hosts(config, server.url, folder)
                url = server.url.replace("127.0.0.1", HERE)
                return trainer_over_hosts(
                    config, url, folder, nodes=nodes[:hosts], host=HERE, environments=environments
                )

            yield make
    except NamespacesUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hosts_train_what_one_host_trains(layout: str, start: Start, tmp_path: Path) -> None:
    hosts, ranks, sizes = LAYOUTS[layout]
    architecture = "qwen3_moe" if "expert_parallel" in sizes else "qwen3"
    model = make_tiny_model(tmp_path / "model", architecture=architecture)
    exports = []
    for count in (hosts, 1):
        with start(model, count, ranks=ranks, **sizes) as run:
            run.begin()
            run.train(3)
            receiver = Receiver(run.trainer.trainer, f"group-{count}")
            assert receiver.manifest.source_ranks == sizes.get("pipeline_parallel", 1)
            tensors, _ = receiver.receive()
            assert tensors
            receiver.leave()
            run.check_books()
            exports.append(run.exported())
    assert exports[0] == exports[1]


def test_a_cut_cable(start: Start, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3")
    with start(model, 2, ranks=2) as run:
        run.begin()
        run.train(3)
        node = run.hosts[0].node
        assert node is not None
        cut = time.monotonic()
        node.cut()
        run.coordinator.wait_for_detail("ranks-1 has been silent for 5 s")
        time.sleep(15 - (time.monotonic() - cut))  # how long it is cut
        node.mend()
        assert run.again() < 5 * PATIENCE
        run.train(2)
        run.check_books()


WRONG_ADDRESS = {"RELAXD_ADVERTISE": f"{SUBNET}.99:50051"}
"""Of no machine."""


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            {"GLOO_SOCKET_IFNAME": "eth7"},
            "ranks-1 finds no way to {trainer}: no interface 'eth7' with an AF_INET address",
        ),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "is not reached from interface lo (127.0.0.1)"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "is not reached from interface eth1 (10.77.0.1)"),
        (WRONG_ADDRESS, f"(its address is {SUBNET}.99:50051, by --host or --advertise"),
    ],
    ids=["no interface", "loopback", "another network", "no machine"],
)
def test_a_host_with_a_wrong_network_is_awaited(wrong: dict[str, str], told: str, start: Start, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3")
    with start(model, 2, ranks=2, environments=[{}, wrong]) as run:
        host = run.hosts[0]
        assert host.node is not None
        said = run.coordinator.wait_for_detail(told.format(trainer=f"{SUBNET}.1"))
        assert said.startswith("waiting for 1 of the 2 hosts (trainer.hosts): ranks-1 ")
        host.kill()
        host.correct({})
        run.begin()
        run.train(1)
        run.check_books()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "the trainer's host finds no way to ranks-1: "),
        (WRONG_ADDRESS, f"ranks-1 finds no way to {SUBNET}.99: "),
    ],
    ids=["another network", "no machine"],
)
def test_a_trainer_with_a_wrong_network_says_so(wrong: dict[str, str], told: str, start: Start, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3")
    with start(model, 2, ranks=2, environments=[wrong, {}]) as run:
        said = run.coordinator.wait_for_detail(told)
        assert ("from interface eth1 (10.77.0.1)" in said) == ("GLOO_SOCKET_IFNAME" in wrong)
        assert ("RELAXD_ADVERTISE" in said) == (wrong is WRONG_ADDRESS)
