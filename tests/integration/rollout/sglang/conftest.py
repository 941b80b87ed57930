"""The real SGLang on a CPU, in an environment of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relaxd.config import RolloutConfig
from tests.integration.rollout.rollout_kit import Source
from tests.kit.engines import EngineRunner
from tests.kit.models import make_tiny_model
from tests.sglang.environment import CPU_ENVIRONMENT, CPU_OPTIONS, EnvironmentUnavailable, sglang_python

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 1200
"""The first test of all may have to build the environment."""

Start = Callable[..., EngineRunner]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine takes some fifteen seconds to start."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter that has SGLang."""
    try:
        return sglang_python()
    except EnvironmentUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3")


@pytest.fixture(scope="module")
def start(python: str, model: Path) -> Iterator[Start]:
    """Starts engines: `start(max_running_samples=4, sglang={...})`; all end with the module."""
    runners: list[EngineRunner] = []

    def start(
        folder: Path = model, sglang: dict[str, Any] | None = None, *, for_logprobs: bool = False, **rollout: Any
    ) -> EngineRunner:
        runners.append(EngineRunner())
        options = CPU_OPTIONS | (sglang or {})
        values = {"max_running_samples": 16, "memory_fraction": 0.3, "threads": 1} | rollout
        config = RolloutConfig(engine="sglang", sglang=options, **values)
        # SGLang wants to know the cores of several ranks.
        cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(config.tensor_parallel)))}
        environment = {**CPU_ENVIRONMENT, **(cores if config.tensor_parallel > 1 else {})}
        runners[-1].start(folder, config, python=python, environment=environment, for_logprobs=for_logprobs)
        return runners[-1]

    yield start
    for runner in runners:
        runner.close()


@pytest.fixture(scope="module")
def source(model: Path) -> Iterator[Source]:
    source = Source(model, 40_000)
    yield source
    source.close()
