"""An engine and a judge on one GPU, each with a share of its memory; and a trainer, with which they take turns."""

import asyncio
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from relaxd.config import RolloutConfig
from relaxd.replica.gpus import SHARE_VARIABLE, memory_used, visible_gpus
from relaxd.v1 import content_pb2, judge_pb2
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.judge_pb2_grpc import JudgeStub
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from services.rollout.engines.request_types import Sampling
from services.rollout.service.child_engine import ALL_MEMORY, ChildEngine
from tests.e2e.asking_reward import REWARD
from tests.e2e.conftest import Workplace
from tests.gpu.run_kit import CHANGES, STEPS, make_workplace, train
from tests.integration.coordinator.cluster import Cluster
from tests.kit.models import make_tiny_model
from tests.kit.waiting import eventually

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang")

OPTIONS = {"attention_backend": "triton", "sampling_backend": "pytorch", "disable_cuda_graph": True}
JUDGE_SHARE = 0.3
FRACTION = 0.5
"""Of each share, for weights and cache."""
OVERHEAD_BYTES = 6 << 30
"""Beside weights and cache: CUDA's context, libraries and work space."""
SAME_BYTES = 2 << 30
"""Memory in use that counts as the same."""


SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""0.2 B parameters."""
JUDGE = """
[roles.judge]
model = "{model}"
engine = "sglang"
dtype = "bfloat16"
gpu_share = 0.3
memory_fraction = 0.5
max_new_tokens = 8
temperature = 1.0
sglang = {{ attention_backend = "triton", sampling_backend = "pytorch", disable_cuda_graph = true }}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3", dtype=torch.bfloat16, **SIZES)


async def start(model: Path, share: float, *, colocate: bool = False) -> ChildEngine:
    return await ChildEngine.start(
        model,
        RolloutConfig(engine="sglang", dtype="bfloat16", memory_fraction=FRACTION, sglang=OPTIONS),
        environment={"CUDA_VISIBLE_DEVICES": "0", SHARE_VARIABLE: repr(share)},
        name=f"share {share}",
        log_level="info",
        on_exit=lambda ended: None,
        on_tokens=lambda count, per_second: None,
        colocate=colocate,
        frozen=True,
    )


async def answers(engine: ChildEngine) -> int:
    """Ask for eight samples at once; returns how many tokens they have together."""
    sampling = Sampling(max_new_tokens=32, temperature=1.0, ignore_eos=True)
    return sum([len(output.tokens) async for output in engine.generate(tuple(range(5, 60)), 8, sampling)])


@pytest.mark.timeout(500)
async def test_engines_that_start_at_once_or_in_turn_have_their_shares(
    model: Path, facts: Callable[[str, object], None]
) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    gpu = visible_gpus()[:1]
    (before,) = memory_used(gpu)

    def in_use() -> int:
        return memory_used(gpu)[0] - before

    engine, judge = await asyncio.gather(start(model, 1 - JUDGE_SHARE), start(model, JUDGE_SHARE))
    try:
        assert await asyncio.gather(answers(engine), answers(judge)) == [256, 256]
        together = in_use()
        facts("both_gib", together / 2**30)
        facts("of_the_gpu", together / total)
        # Each alone would have taken half of the GPU, or of what the other had left of it when it looked.
        assert 0 <= together - FRACTION * total < 2 * OVERHEAD_BYTES

        await engine.stop()
        # Its schedulers free their memory a moment after its first process has ended.
        most = FRACTION * JUDGE_SHARE * total + OVERHEAD_BYTES
        await eventually(lambda: in_use() < most, "the stopped engine's memory is free", 30.0)
        facts("judge_gib", in_use() / 2**30)
        assert in_use() >= FRACTION * JUDGE_SHARE * total
        engine = await start(model, 1 - JUDGE_SHARE)
        assert await asyncio.gather(answers(engine), answers(judge)) == [256, 256]
        assert abs(in_use() - together) < SAME_BYTES
    finally:
        await asyncio.gather(engine.stop(), judge.stop())


@pytest.fixture
def cluster(model: Path, tmp_path: Path, redis_url: str) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, redis_url, model)
    cluster.gpu_lease_seconds = 60.0
    cluster.coordinator()
    yield cluster
    cluster.close()


@pytest.mark.timeout(400)
def test_the_services_lease_shares_of_one_gpu_and_the_judge_replies(cluster: Cluster) -> None:
    settings: dict[str, Any] = {
        **{f"rollout__{name}": value for name, value in {"engine": "sglang", "dtype": "bfloat16"}.items()},
        **{f"rollout.sglang__{name}": value for name, value in OPTIONS.items()},
        "weights__transport": "nccl",
        "roles.judge__model": str(cluster.model),
        "roles.judge__engine": "sglang",
        "roles.judge__dtype": "bfloat16",
        "roles.judge__max_new_tokens": 16,
        "roles.judge__gpu_share": JUDGE_SHARE,
        **{f"roles.judge.sglang__{name}": value for name, value in OPTIONS.items()},
    }
    cluster.start_when_up("run", **settings)
    cluster.replica("rollout-1", "services.rollout", CUDA_VISIBLE_DEVICES="0")
    cluster.replica("judge-1", "services.rollout.judge", CUDA_VISIBLE_DEVICES="0")

    def replicas() -> dict[str, pb.RegisteredReplica]:
        found = cluster.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
        return {replica.registration.replica_id: replica for replica in found}

    def loaded() -> dict[str, pb.RegisteredReplica] | None:
        found = replicas()
        engine, judge = found.get("rollout-1"), found.get("judge-1")
        if engine is None or judge is None or judge.status.state != REPLICA_STATE_READY:
            return None
        return found if engine.status.detail == "waiting for weights" and not judge.status.detail else None

    found = cluster.until("both have loaded their models", loaded, 240)
    assert len(found["judge-1"].leased_gpu_uuids) == 1
    assert found["judge-1"].leased_gpu_uuids == found["rollout-1"].leased_gpu_uuids
    assert found["judge-1"].leased_gpu_share == pytest.approx(JUDGE_SHARE)
    assert found["rollout-1"].leased_gpu_share == pytest.approx(1 - JUDGE_SHARE)
    question = content_pb2.Message(role="user", content=[content_pb2.ContentPart(text="Is 2 + 2 = 4?")])
    with grpc.insecure_channel(found["judge-1"].registration.address) as channel:
        reply = JudgeStub(channel).Ask(judge_pb2.AskRequest(messages=[question], seed=1), timeout=60)
    assert 0 < reply.tokens <= 16


@pytest.mark.timeout(400)
def test_a_colocated_run_whose_judge_sleeps_and_wakes_up_with_the_same_weights(
    model: Path, tmp_path: Path, end: list[Workplace], facts: Callable[[str, object], None]
) -> None:
    changes = (*CHANGES, ('name = "tiny_reward:even_bytes"', 'name = "asking:asked"'))
    place = make_workplace(tmp_path, changes, architecture="qwen3", **SIZES)
    end.append(place)
    (place.folder / "asking.py").write_text(REWARD)
    with (place.folder / "run.toml").open("a") as config:
        config.write(JUDGE.format(model=model))
    folder, lines = train(place, CUDA_VISIBLE_DEVICES="0")

    assert all(line["reward_length"] > 0 for line in lines)
    log = (folder / "logs" / "judge.log").read_text()
    turns = re.findall(r"INFO judge (asleep|awake): ([0-9.]+) GB are in use now, after ([0-9.]+)", log)
    assert [turn for turn, _, _ in turns].count("asleep") >= STEPS, log
    for turn, after, before in turns:
        assert (float(after) < float(before)) == (turn == "asleep"), turns
    facts("asleep_and_awake_gb", " ".join(after for _, after, _ in turns[:2]))
    facts("step_seconds", lines[-1]["step_seconds"])


@pytest.mark.timeout(300)
async def test_a_judge_that_slept_says_the_same(model: Path) -> None:
    judge = await start(model, JUDGE_SHARE, colocate=True)
    try:
        greedy = Sampling(max_new_tokens=32, temperature=0.0, ignore_eos=True)
        first = [list(output.tokens) async for output in judge.generate(tuple(range(5, 60)), 1, greedy)]
        freed = await judge.sleep(60.0)
        assert freed.after_bytes < 0.5 * freed.before_bytes
        assert not judge.serving
        await judge.wake(ALL_MEMORY, 60.0)
        assert judge.serving
        assert [list(output.tokens) async for output in judge.generate(tuple(range(5, 60)), 1, greedy)] == first
    finally:
        await judge.stop()
