"""Fixtures of the trainer's tests."""

from pathlib import Path

import pytest

from tests.kit.models import make_tiny_model


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3") / "model", architecture="qwen3")
