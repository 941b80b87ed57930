"""A teacher's SGLang engine on a GPU: log-probs beside transformers' in bfloat16, long answers, speed, its share."""

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from relaxd.config import RolloutConfig
from relaxd.replica.gpus import memory_used, visible_gpus
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from tests.integration.coordinator.cluster import Cluster
from tests.kit.engines import EngineRunner
from tests.kit.models import make_tiny_model

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang")

DEVICE = "cuda"
TEMPERATURE = 0.7
TOP_K = 8
TOLERANCE = 0.1
"""Of a log-prob under this temperature: bfloat16 activations, other kernels."""
CONTEXT = 32_768
SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}
"""0.3 B parameters, half of them in the vocabulary, whose logits would fill 20 GB for a whole context."""
OPTIONS = {"attention_backend": "triton", "sampling_backend": "pytorch", "disable_cuda_graph": True}
SHARE = 0.3
SEQUENCES, PROMPT, ANSWER = 64, 512, 3584
"""Of the measurement: groups of eight answers to a prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3", dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineRunner]:
    config = RolloutConfig(
        engine="sglang",
        dtype="bfloat16",
        temperature=TEMPERATURE,
        max_running_samples=128,
        memory_fraction=0.4,
        sglang=OPTIONS,
    )
    runner = EngineRunner()
    try:
        runner.start(model, config, timeout=400, for_logprobs=True)
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().to(DEVICE)


def of_vocabulary(reference: PreTrainedModel, tokens: NDArray[np.integer], last: int) -> torch.Tensor:
    """[last, vocabulary]: float32 log-probs in the places of the last tokens, whose logits are rounded to bfloat16."""
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64)).to(DEVICE)[None]
        hidden = reference.model(ids).last_hidden_state[0, -last - 1 : -1]
        return (reference.lm_head(hidden).float() / TEMPERATURE).log_softmax(-1).cpu()


def random_tokens(count: int, seed: int) -> NDArray[np.integer]:
    return np.random.default_rng(seed).integers(3, SIZES["vocab_size"], count)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("length", [1, 300, 3000])
def test_log_probs_and_candidates_are_those_of_transformers(
    engine: EngineRunner, reference: PreTrainedModel, length: int, facts: Callable[[str, object], None]
) -> None:
    """The second time the prompt is in the prefix cache."""
    tokens = random_tokens(200 + length, seed=length)
    last = min(length, 512)
    expected = of_vocabulary(reference, tokens, last)
    own = expected.gather(-1, torch.from_numpy(tokens[-last:])[:, None])[:, 0].numpy()
    for _ in range(2):
        logprobs, ids, values = engine.logprobs(tokens.tolist(), 200, TOP_K)
        assert len(logprobs) == length
        assert ids.shape == values.shape == (length, TOP_K)
        difference = np.abs(logprobs[-last:] - own)
        assert difference.max() < TOLERANCE
        # Near ties come in another order, so the candidates are compared by what transformers says of them.
        theirs = expected.gather(-1, torch.from_numpy(ids[-last:].astype(np.int64))).numpy()
        assert np.abs(theirs - values[-last:]).max() < TOLERANCE
        assert (values[:, :-1] >= values[:, 1:]).all()
        assert np.abs(values[-last:, -1] - expected.topk(TOP_K).values[:, -1].numpy()).max() < TOLERANCE
    facts("mean difference", float(difference.mean()))
    facts("largest", float(difference.max()))


@pytest.mark.timeout(600)
def test_an_answer_that_fills_the_context(
    engine: EngineRunner, reference: PreTrainedModel, facts: Callable[[str, object], None]
) -> None:
    assert engine.engine.context == CONTEXT
    tokens = random_tokens(CONTEXT, seed=7)
    started = time.monotonic()
    logprobs, _, _ = engine.logprobs(tokens.tolist(), 100)
    facts("seconds", time.monotonic() - started)
    assert len(logprobs) == CONTEXT - 100
    assert np.isfinite(logprobs).all()
    expected = of_vocabulary(reference, tokens, 256)
    own = expected.gather(-1, torch.from_numpy(tokens[-256:])[:, None])[:, 0].numpy()
    assert np.abs(logprobs[-256:] - own).max() < TOLERANCE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_prefill_speed(engine: EngineRunner, top_k: int, facts: Callable[[str, object], None]) -> None:
    """Tokens of prompts and answers by second, of answers that are there at once; a prompt counts for each answer."""

    def ask(seed: int) -> float:
        started = time.monotonic()
        tasks = []
        for number in range(SEQUENCES):
            prompt = random_tokens(PROMPT, seed=1000 * seed + number // 8)
            tokens = np.concatenate([prompt, random_tokens(ANSWER, seed=1000 * seed + 500 + number)])
            tasks.append(engine.begin(engine.engine.compute_logprobs(tokens, PROMPT, top_k, 300.0)))
        for task in tasks:
            assert len(engine.finish(task)[0]) == ANSWER
        return SEQUENCES * (PROMPT + ANSWER) / (time.monotonic() - started)

    ask(10 * top_k + 1)  # compiles kernels
    facts("prefill tokens/s", ask(10 * top_k + 2))
    facts("GiB in use", memory_used(visible_gpus()[:1])[0] / 2**30)


@pytest.fixture
def cluster(model: Path, tmp_path: Path, redis_url: str) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, redis_url, model)
    cluster.gpu_lease_seconds = 60.0
    cluster.coordinator()
    yield cluster
    cluster.close()


@pytest.mark.timeout(500)
def test_the_service_leases_a_share_of_the_engines_gpu(cluster: Cluster) -> None:
    settings: dict[str, Any] = {
        "algorithm__name": "opd",
        **{f"rollout__{name}": value for name, value in {"engine": "sglang", "dtype": "bfloat16"}.items()},
        **{f"rollout.sglang__{name}": value for name, value in OPTIONS.items()},
        "weights__transport": "nccl",
        "trainer__dtype": "bfloat16",
        "roles.teacher__model": str(cluster.model),
        "roles.teacher__engine": "sglang",
        "roles.teacher__gpu_share": SHARE,
        **{f"roles.teacher.sglang__{name}": value for name, value in OPTIONS.items()},
    }
    cluster.start_when_up("run", **settings)
    cluster.replica("rollout-1", "services.rollout", CUDA_VISIBLE_DEVICES="0")
    cluster.replica("teacher-1", "services.rollout.teacher", CUDA_VISIBLE_DEVICES="0")

    def loaded() -> dict[str, pb.RegisteredReplica] | None:
        listed = cluster.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
        found = {replica.registration.replica_id: replica for replica in listed}
        engine, teacher = found.get("rollout-1"), found.get("teacher-1")
        if engine is None or teacher is None or teacher.status.state != REPLICA_STATE_READY:
            return None
        return found if engine.status.detail == "waiting for weights" and not teacher.status.detail else None

    found = cluster.until("both have loaded their models", loaded, 300)
    assert found["teacher-1"].leased_gpu_uuids == found["rollout-1"].leased_gpu_uuids
    assert found["teacher-1"].leased_gpu_share == pytest.approx(SHARE)
    assert found["rollout-1"].leased_gpu_share == pytest.approx(1 - SHARE)
