"""A tiny model's folder, made once."""

from pathlib import Path

import pytest

from tests.kit.models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
