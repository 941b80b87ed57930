"""A trainer over two hosts with a GPU each, beside one host with both.

Two groups of processes of one machine, which NCCL takes for two hosts: each sees one GPU and has its own NCCL_HOSTID,
and neither GPUs nor memory are shared between them, so that NCCL sends all through sockets.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from tests.integration.trainer.hosts.host_kit import TrainerOverHosts, trainer_over_hosts
from tests.integration.trainer.service_kit import export, make_config
from tests.integration.trainer.trainer_worlds import make_model
from tests.kit.redis.redis_server import RedisServer

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(240)]
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
HOSTS = [{"CUDA_VISIBLE_DEVICES": str(gpu), "NCCL_HOSTID": f"host-{gpu}", **APART} for gpu in range(2)]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
LAYOUTS = {
    "DP2": ("qwen3", {}),
    "PP2": ("qwen3", {"pipeline_parallel": 2}),
    "EP2": ("qwen3_moe", {"expert_parallel": 2}),
}
STEPS = 5
OPTIMIZER = {"lr": 1e-2, "epsilon": 1e-3}
"""With this epsilon a rounding error of a gradient that is nearly zero doesn't move a weight by a whole step."""
Facts = Callable[[str, object], None]


def start(model: Path, url: str, folder: Path, hosts: int, **trainer: Any) -> AbstractContextManager[TrainerOverHosts]:
    """A trainer over two hosts with a GPU each, or on one with both."""
    config = make_config(
        model,
        run={"steps": 20},
        trainer={"ranks": 2, "hosts": hosts, "checkpoint": {"every": 2}, "optimizer": OPTIMIZER, **trainer},
        board={"max_staleness": 0, "lease_seconds": 30},
    )
    return trainer_over_hosts(config, url, folder / f"run-{hosts}", environments=HOSTS if hosts == 2 else ())


def seconds_of_steps(run: TrainerOverHosts, steps: int) -> list[float]:
    """Train steps; return the seconds that each took."""
    seconds = []
    for _ in range(steps):
        began = time.monotonic()
        run.train(1)
        seconds.append(time.monotonic() - began)
    return seconds


def tensors(folder: Path) -> dict[str, Any]:
    """Return all tensors of a model's files."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hosts_train_what_one_host_trains(
    layout: str, redis_server: Callable[..., RedisServer], tmp_path: Path, facts: Facts
) -> None:
    architecture, sizes = LAYOUTS[layout]
    model = make_model(tmp_path / "model", architecture, tied=True, **SHAPE)
    before = tensors(model)
    url = redis_server(append_only=False).url
    ends = []
    for hosts in (2, 1):
        with start(model, url, tmp_path, hosts, **sizes) as run:
            run.begin()
            run.train(1)
            facts(f"{hosts} hosts, ms a step", 1e3 * statistics.median(seconds_of_steps(run, STEPS)))
            run.check_books()
            ends.append(tensors(export(run.trainer, "model")))
    two, one = ends
    moved = max(float(np.abs(one[name] - before[name]).max()) for name in one)
    apart = max(float(np.abs(one[name] - two[name]).max()) for name in one)
    facts("moved", moved)
    facts("apart", apart)
    assert moved > 1e-3
    assert apart < 1e-2 * moved


def test_a_rank_on_the_other_host_is_killed(
    redis_server: Callable[..., RedisServer], tmp_path: Path, facts: Facts
) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=True, **SHAPE)
    with start(model, redis_server(append_only=False).url, tmp_path, 2) as run:
        run.begin()
        run.train(4)
        (pid,) = run.hosts[0].rank_pids()
        killed = time.monotonic()
        psutil.Process(pid).kill()
        run.again()
        facts("trains again after s", time.monotonic() - killed)
        run.train(2)
        run.check_books()
