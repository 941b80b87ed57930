"""A transformers engine that sleeps gives its memory back to the system."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxd.config import RolloutConfig
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import check_logprobs, sync
from tests.kit.engines import EngineRunner
from tests.kit.models import make_tiny_model

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 37 million parameters, which is 150 MB."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 8}
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3", num_key_value_heads=8, **shape)


@pytest.fixture
def runner() -> Iterator[EngineRunner]:
    with contextlib.closing(EngineRunner()) as runner:
        yield runner


@pytest.fixture
def source(model: Path) -> Iterator[Source]:
    with contextlib.closing(Source(model, 40_000_000)) as source:
        yield source


@pytest.mark.slow
def test_an_engine_gives_memory_back(runner: EngineRunner, source: Source, model: Path) -> None:
    runner.start(model, RolloutConfig(threads=1))
    size = (model / "model.safetensors").stat().st_size
    sync(runner, source, 1)
    (answer,) = runner.generate(PROMPT, max_new_tokens=4)
    assert answer.versions == [1] * 4

    begun = runner.ask(PROMPT, 2, stream=True, max_new_tokens=40, ignore_eos=True)
    runner.wait_begun(begun)
    change = runner.run(runner.engine.sleep(60.0))
    assert [len(each.tokens) for each in runner.wait(begun)] == [40, 40]
    assert change.before_bytes - change.after_bytes > 0.8 * size
    assert not runner.engine.serving
    waiting = runner.ask(PROMPT, max_new_tokens=4)

    runner.run(runner.engine.wake(["weights"], 30.0))
    sync(runner, source, 2)
    assert not waiting.begun.is_set()
    runner.run(runner.engine.wake(["kv_cache"], 30.0))
    (answer,) = runner.wait(waiting)
    assert answer.versions == [2] * 4
    check_logprobs(model, PROMPT, answer)
    change = runner.run(runner.engine.sleep(30.0))
    assert change.before_bytes - change.after_bytes > 0.8 * size
