"""One SGLang server for all tests here; it takes some fifteen seconds to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.rollout.sglang_external.external_kit import CPU_FLAGS, Server, Trainer
from tests.kit.models import make_tiny_model
from tests.sglang.environment import EnvironmentUnavailable, sglang_python

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 1200
"""The first test of all may have to build SGLang's environment, or wait for another worker that does."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They all need a server that takes its time."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3")


@pytest.fixture(scope="module")
def trainer(model: Path) -> Iterator[Trainer]:
    tensors = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    del tensors["lm_head.weight"]  # tied
    trainer = Trainer(tensors, bucket_bytes=60_000)
    yield trainer
    trainer.close()


@pytest.fixture(scope="package")
def server(model: Path) -> Iterator[Server]:
    try:
        python = sglang_python()
    except EnvironmentUnavailable as error:
        pytest.skip(str(error))
    server = Server(python, model, *CPU_FLAGS)
    server.start()
    try:
        server.wait_until_up()
        yield server
    finally:
        server.kill()
