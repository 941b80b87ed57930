"""A rollout replica whose engine is SGLang, in an interpreter of its own: calls, weights and groups of the board."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import grpc
import pytest
from transformers import AutoTokenizer

from relaxd.rpc.errors import field_violations
from relaxd.v1 import rollout_pb2, weights_pb2
from tests.integration.rollout.rollout_kit import READY, Stage
from tests.sglang.environment import CPU_ENVIRONMENT, CPU_OPTIONS

PROMPT = [5, 9, 17, 200, 33]


@pytest.fixture
def stage(model: Path, python: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name, value in {**CPU_ENVIRONMENT, "RELAXD_ENGINE_PYTHON": python}.items():
        monkeypatch.setenv(name, value)
    stage = Stage(model, redis_url, tmp_path, engine="sglang", sglang=CPU_OPTIONS, memory_fraction=0.3)
    yield stage
    stage.close()


def test_a_replica_with_sglang(stage: Stage, model: Path) -> None:
    replica = stage.start_replica()
    replica.wait_for(lambda status: status.detail.startswith("loading"))
    replica.wait_for(lambda status: status.state == READY, 180)
    group = weights_pb2.WeightGroup(
        name="g", world_size=2, store_host="h", store_port=1, transport="TRANSPORT_NCCL", timeout_seconds=1
    )
    request = rollout_pb2.JoinWeightGroupRequest(group=group, rank=1, manifest=stage.source.manifest)
    with pytest.raises(grpc.RpcError) as error:
        replica.stub.JoinWeightGroup(request, timeout=5)
    assert 'this engine is on a CPU: use "gloo"' in dict(field_violations(error.value))["group.transport"]
    stage.sync(0)
    replica.wait_for(lambda status: status.weights.term == 1)
    samples = replica.generate(PROMPT, n=2, max_new_tokens=6, ignore_eos=True)
    assert [(len(sample["tokens"]), sample["versions"]) for sample in samples] == [(6, [0] * 6)] * 2
    ids = stage.publish(3)
    groups = stage.generated(3)
    assert set(groups) == set(ids)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for columns in groups.values():
        assert len(columns["lengths"]) == 3
        assert sum(columns["lengths"]) == len(columns["tokens"]) == len(columns["rollout_logprobs"])
        assert set(columns["versions"]) == {0}
        ends = list(accumulate(columns["lengths"]))
        answers = [columns["tokens"][end - length : end] for end, length in zip(ends, columns["lengths"], strict=True)]
        # The end token isn't part of the text: that of an answer which ends at once is empty.
        said = [
            answer[: -1 if finish == "stop" else None]
            for answer, finish in zip(answers, columns["finish"], strict=True)
        ]
        assert columns["text"] == [tokenizer.decode(answer) for answer in said]
    replica.wait_for(lambda status: status.gauges.get("engine_rss_bytes", 0) > 1e8)
    replica.wait_for(
        lambda status: status.gauges["engine_prompted_tokens"] >= status.gauges["engine_prefilled_tokens"] > 0
    )
