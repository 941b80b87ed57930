"""The SGLang engine on a GPU: CUDA graphs, log-probabilities beside transformers', pauses between two steps.

The engine serves the weights that it was started with (benchmarks.engine_process); new ones are tests/gpu's
weight tests.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang.srt")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.engine import default_options
from relaxd.config import RolloutConfig
from relaxd.engines import ENGINES
from relaxd.v1.weights_pb2 import WeightManifest
from tests.kit.engines import EngineRunner, reference_logprobs
from tests.kit.models import byte_tokenizer

PROMPTS = [list(range(5, 13)), list(range(40, 140))]
TOLERANCE = 0.06
"""Of a log-probability: bfloat16 activations, other kernels."""
LONG = 1500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    network = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True, eos_token_id=2)).bfloat16()
    network.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().cuda()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineRunner]:
    sglang = ENGINES["sglang"]
    ENGINES["sglang"] = replace(sglang, process="benchmarks.engine_process")
    options = default_options(16) | {"load_format": "auto", "max_total_tokens": 32768}
    config = RolloutConfig(
        engine="sglang", dtype="bfloat16", max_running_samples=16, memory_fraction=0.2, sglang=options
    )
    runner = EngineRunner()
    try:
        runner.start(model, config, timeout=400)
        commit(runner, 0)
        yield runner
    finally:
        runner.close()
        ENGINES["sglang"] = sglang


def commit(runner: EngineRunner, version: int, mode: str = "in_place") -> int:
    held = runner.pause(mode)
    runner.join("none", 1, WeightManifest())
    runner.receive("none", version)
    runner.resume()
    return held


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_logprobs_are_those_of_transformers(
    engine: EngineRunner, reference: PreTrainedModel, temperature: float, facts: Callable[[str, object], None]
) -> None:
    assert engine.engine.device == "cuda"
    asked = [engine.ask(prompt, 4, max_new_tokens=24, temperature=temperature, ignore_eos=True) for prompt in PROMPTS]
    differences = []
    for prompt, each in zip(PROMPTS, asked, strict=True):
        for answer in engine.wait(each):
            assert len(answer.tokens) == 24
            right = reference_logprobs(reference, prompt, answer.tokens, temperature or 1.0)
            differences.append((right - torch.tensor(answer.logprobs).double()).abs())
    worst = torch.cat(differences)
    facts("mean difference", float(worst.mean()))
    facts("largest", float(worst.max()))
    assert worst.max() < TOLERANCE


@pytest.mark.parametrize(("mode", "spans"), [("in_place", True), ("retract", False)])
def test_an_update_between_two_tokens(engine: EngineRunner, mode: str, spans: bool) -> None:
    assert engine.engine.weights is not None
    before = engine.engine.weights.version
    asked = [engine.ask(prompt, 4, stream=True, max_new_tokens=LONG, ignore_eos=True) for prompt in PROMPTS]
    engine.wait_begun(*asked)
    assert commit(engine, before + 1, mode) == 8
    for each in asked:
        for answer in engine.wait(each):
            assert len(answer.tokens) == len(answer.versions) == len(answer.logprobs) == LONG
            assert answer.versions == sorted(answer.versions)
            assert set(answer.versions) == {before, before + 1}
            assert answer.spans_weight_update == spans


def test_abort_ends_requests_with_what_they_have(engine: EngineRunner) -> None:
    asked = engine.ask(PROMPTS[0], 4, stream=True, max_new_tokens=LONG, ignore_eos=True)
    engine.wait_begun(asked)
    assert engine.pause("abort") == 0
    for answer in engine.wait(asked):
        assert answer.finish == "abort"
        assert 0 < len(answer.tokens) == len(answer.logprobs) < LONG
    engine.resume()
    assert [answer.finish for answer in engine.generate(PROMPTS[0], max_new_tokens=3, ignore_eos=True)] == ["length"]
