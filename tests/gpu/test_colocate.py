"""Trainer and engine on one GPU: weights by CUDA IPC, memory that is really given back, and a whole run."""

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import Workplace
from tests.gpu.run_kit import CHANGES, make_workplace, train
from tests.gpu.weight_members import ELEMENTS, Member, broadcast, connect
from tests.kit.finished_runs import warnings_of


@pytest.fixture
def members() -> Iterator[list[Member]]:
    members = [Member(0, "cuda_ipc") for _ in range(3)]
    yield members
    for member in members:
        member.process.kill()
        member.process.wait()


def test_processes_on_one_gpu_send_weights_to_each_other(
    members: list[Member], facts: Callable[[str, object], None]
) -> None:
    members[0].tell(do="host")
    port = members[0].answer()["port"]
    facts("connect_seconds", connect(members, port, "first"))
    broadcast(members, source=0, value=3.0)
    broadcast(members, source=1, value=-4.0)
    seconds = broadcast(members, source=0, value=5.0, repeat=20)
    facts("gigabytes_per_second", 20 * 2 * sum(ELEMENTS) / seconds / 1e9)

    # A reader dies: the source fills its slots, finds none free, and says so in time. The others go on without it.
    members[2].process.kill()
    members[2].process.wait()
    started = time.monotonic()
    for member in members[:2]:
        member.tell(do="broadcast", elements=ELEMENTS, source=0, value=1.0, timeout=3.0, repeat=4)
    answers = [member.answer() for member in members[:2]]
    assert any("error" in answer for answer in answers), answers
    assert time.monotonic() - started < 15
    rest = members[:2]
    connect(rest, port, "second")
    broadcast(rest, source=1, value=7.0)
    for member in rest:
        member.tell(do="works")
        assert member.answer()["sum"] == 1 << 20

    # The source dies: who reads is told to leave, and its GPU still works.
    rest[1].tell(do="broadcast", elements=ELEMENTS, source=0, value=1.0, timeout=60, abort_after=1.0)
    rest[0].process.kill()
    aborted = rest[1].answer()
    assert "error" in aborted, aborted
    assert aborted["took"] < 10
    rest[1].tell(do="works")
    assert rest[1].answer()["sum"] == 1 << 20


@pytest.mark.gpu(2)
def test_processes_on_two_gpus_send_weights_to_each_other(facts: Callable[[str, object], None]) -> None:
    """As a trainer of two ranks does, whose first one sends to the engine on the second one's GPU: neither sees the
    other one's."""
    members = [Member(0, "cuda_ipc", CUDA_VISIBLE_DEVICES=seen) for seen in ("0", "0", "1")]
    try:
        members[0].tell(do="host")
        port = members[0].answer()["port"]
        connect(members, port, "two")
        broadcast(members, source=0, value=3.0)
        seconds = broadcast(members, source=0, value=5.0, repeat=20)
        facts("gigabytes_per_second", 20 * 2 * sum(ELEMENTS) / seconds / 1e9)
    finally:
        for member in members:
            member.process.kill()
            member.process.wait()


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang")
@pytest.mark.timeout(380)
def test_a_colocated_run(tmp_path: Path, end: list[Workplace], facts: Callable[[str, object], None]) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    place = make_workplace(tmp_path, CHANGES, architecture="qwen3", **sizes, **heads)  # 0.2 B parameters
    end.append(place)
    folder, lines = train(place, CUDA_VISIBLE_DEVICES="0")
    assert warnings_of(folder) == []

    steady = lines[-1]
    parts = ("engine_awake_bytes", "engine_asleep_bytes", "trainer_awake_bytes", "trainer_asleep_bytes")
    gib = {name: steady[name] / 2**30 for name in parts}
    facts("step_seconds", steady["step_seconds"])
    for line in lines:
        assert 0 < line["mfu"] < 1, line
        assert line["train_tflops_per_gpu"] > 0
        assert line["tokens_per_second_per_gpu"] > 0
    facts("mfu", steady["mfu"])
    facts("train_tflops_per_gpu", steady["train_tflops_per_gpu"])
    for name in sorted(steady):
        if name.startswith("switch_"):
            facts(name.removeprefix("switch_"), steady[name])
    for name, value in sorted(gib.items()):
        facts(name.replace("_bytes", "_gib"), value)
    # Half of the GPU is the engine's; 16 bytes a parameter, and more, are the trainer's.
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert gib["engine_awake_bytes"] - gib["engine_asleep_bytes"] > 0.3 * total, gib
    assert gib["trainer_awake_bytes"] - gib["trainer_asleep_bytes"] > 1.5, gib


@pytest.mark.gpu(2)
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang")
@pytest.mark.timeout(380)
def test_an_engine_over_two_gpus_takes_turns_with_the_ranks_on_them(
    tmp_path: Path, end: list[Workplace], facts: Callable[[str, object], None]
) -> None:
    """SGLang refuses to start where one of its GPUs has a tenth less memory free than another: nobody may take or give
    back memory there while it starts."""
    changes = (
        *CHANGES,
        ("max_running_samples = 64", "max_running_samples = 64\ntensor_parallel = 2"),
        ("groups_per_step = 4", "groups_per_step = 4\nranks = 2\ntensor_parallel = 2\nexpert_parallel = 2"),
    )
    sizes = {"hidden_size": 2048, "num_hidden_layers": 12, "num_experts": 32, "moe_intermediate_size": 768}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    place = make_workplace(tmp_path, changes, architecture="qwen3_moe", tied=False, **sizes, **heads)  # 1.9 B
    end.append(place)
    folder, lines = train(place, difference=0.05)  # rounding sends some tokens to another expert
    assert "unbalanced" not in (folder / "logs" / "rollout.log").read_text()
    facts("step_seconds", lines[-1]["step_seconds"])
    facts("trainer_awake_gib", lines[-1]["trainer_awake_bytes"] / 2**30)
    facts("trainer_asleep_gib", lines[-1]["trainer_asleep_bytes"] / 2**30)
