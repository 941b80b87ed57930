"""The whole stack on two GPUs, as `relaxd run` starts it: a Megatron trainer on one, an SGLang engine on the other."""

import json
import math
import re
import statistics
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import StateFolder
from relaxd.roles import ROLLOUT, TRAINER
from tests.e2e.conftest import REWARD, Workplace
from tests.gpu.run_kit import CONFIG
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import make_tiny_model

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang")

STEPS = 4
DEADLINE_SECONDS = 240.0
"""Of the run, whose engine alone may take a minute to start."""


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """A small random Qwen3 and a configuration."""
    model = make_tiny_model(
        tmp_path / "model",
        architecture="qwen3",
        dtype=torch.bfloat16,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    (tmp_path / "tiny_reward.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(CONFIG.format(model=model, steps=STEPS))
    place = Workplace(tmp_path)
    yield place
    place.end()
    place.relaxd("down")


@pytest.mark.gpu(2)
@pytest.mark.timeout(330)
def test_a_run_with_an_sglang_engine(workplace: Workplace, facts: Callable[[str, object], None]) -> None:
    process = workplace.start("run", "run.toml", "--run-id", "gpu")
    late = threading.Timer(DEADLINE_SECONDS, process.terminate)  # so that the logs are shown
    late.start()
    state = StateFolder(workplace.folder / ".relaxd")
    assert process.stdout is not None
    output: list[str] = []
    gpus: dict[int, list[str]] = {}
    gauges: dict[int, dict[str, float]] = {}
    started: list[psutil.Process] = []
    for line in process.stdout:
        output.append(line)
        if re.match(rf"step +2/{STEPS}", line):
            stack = state.read()
            assert stack is not None
            with CoordinatorClient(stack.coordinator) as coordinator:
                replicas = coordinator.replicas()
            gpus = {r.registration.role: list(r.leased_gpu_uuids) for r in replicas}
            gauges = {r.registration.role: dict(r.status.gauges) for r in replicas}
            started = psutil.Process(stack.pid).children(recursive=True)
    late.cancel()
    logs = workplace.folder / ".relaxd" / "logs"
    tails = "".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(logs.glob("*.log")))
    assert process.wait(timeout=60) == 0, "".join(output) + tails

    trainer, engine = gpus[TRAINER], gpus[ROLLOUT]
    assert (len(trainer), len(engine), len({*trainer, *engine})) == (1, 1, 2), gpus
    for role in (TRAINER, ROLLOUT):
        assert gauges[role]["gpu_memory_bytes"] > 1e8, gauges
    assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    folder = workplace.folder / "runs" / "gpu"
    summary = read_summary(folder)
    check_books(summary, steps=STEPS, groups_per_step=4)
    assert summary["notes"] == []
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    for line in lines[1:]:
        assert math.isfinite(line["loss"])
        assert line["grad_norm"] > 0
        assert 0 <= line["staleness_max"] <= 1
    # Two implementations of bf16 agree on a token's log-prob to about 1 % on average.
    differences = [line["logprob_difference"] for line in lines[1:] if "logprob_difference" in line]
    assert differences
    assert max(differences) < 0.03, differences
    assert (folder / "model" / "config.json").exists()

    # Each version reached the engine at the first attempt, the last one for the evaluation, and was learned from.
    log = (folder / "logs" / "coordinator.log").read_text()
    assert not re.search("weight synchronisation .* failed", log), log
    syncs = re.findall(r"version (\d+) is on 1 engines after ([0-9.]+) s", log)
    versions = [int(version) for version, _ in syncs]
    assert versions == sorted(set(versions)), versions
    assert (versions[0], versions[-1]) == (0, STEPS)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert max(sample["version"] for sample in samples) >= STEPS - 2

    facts("wall_seconds", summary["wall_seconds"])
    facts("step_seconds", statistics.median(line["step_seconds"] for line in lines[2:]))
    facts("sync_seconds", statistics.median(float(seconds) for _, seconds in syncs[1:]))
    facts("logprob_difference", max(differences))
