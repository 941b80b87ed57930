"""A trainer over two hosts whose ranks speak NCCL: one machine, on which it may use sockets only, as between hosts."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import Workplace, open_workplace
from tests.e2e.test_run import check_books, read_summary
from tests.kit.models import make_tiny_model

SOCKETS_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_DEBUG": "INFO"}
STEPS = 6


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = make_tiny_model(tmp_path / "model", architecture="qwen3", dtype=torch.bfloat16, **sizes)
    with open_workplace(tmp_path, model) as place:
        yield place


@pytest.mark.gpu(2)
@pytest.mark.timeout(280)
def test_a_run_outlives_a_host_of_its_trainer(workplace: Workplace, facts: Callable[[str, object], None]) -> None:
    words = [
        *("--run.steps", str(STEPS), "--trainer.ranks", "2", "--trainer.hosts", "2", "--trainer.checkpoint.every", "2"),
        *("--trainer.dtype", "bfloat16", "--rollout.dtype", "bfloat16", "--weights.transport", "gloo"),
    ]
    run = workplace.start("run", "tiny.toml", *words, "--run-id", "hosts", "--no-console", **SOCKETS_ONLY)
    workplace.kill_in_step(run, 3, "ranks")
    folder = workplace.folder / "runs" / "hosts"
    check_books(read_summary(folder), steps=STEPS)
    logs = "\n".join(file.read_text(errors="replace") for file in sorted((folder / "logs").glob("*.log")))
    ways = set(re.findall(r"via (\w+/\w+|\w+)", logs))
    facts("ways of NCCL", ", ".join(sorted(ways)))
    assert any(way.startswith("NET") for way in ways)
    assert not any(way.startswith(("P2P", "SHM")) for way in ways)
    code, output = workplace.relaxd("replay", "hosts", "--step", str(STEPS))
    facts("same numbers in a replay on one host", output.count("the same"))
    assert code == 0, output
