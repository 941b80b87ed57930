"""One SGLang server for all tests here; it takes some fifteen seconds to start."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sglang_external.server import CPU_FLAGS, Server
from tests.models import make_tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of an environment that has SGLang."""
    python = Path(os.environ.get("RELAXD_SGLANG_VENV") or ROOT / ".venv-sglang") / "bin" / "python"
    if not python.exists():
        pytest.skip("needs an environment with SGLang: set RELAXD_SGLANG_VENV")
    return str(python)


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3")


@pytest.fixture(scope="package")
def server(sglang_python: str, model: Path) -> Iterator[Server]:
    server = Server(sglang_python, model, *CPU_FLAGS)
    server.start()
    try:
        server.wait_until_up()
        yield server
    finally:
        server.kill()
