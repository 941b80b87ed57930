"""Clusters whose parts go wrong."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.health.kit import HealthCluster
from tests.kit.tokenizer import write_tokenizer


@pytest.fixture
def cluster(tmp_path: Path, redis_url: str) -> Iterator[HealthCluster]:
    """A coordinator that is starting, and nothing else."""
    cluster = HealthCluster(tmp_path, redis_url, write_tokenizer(tmp_path / "model"))
    cluster.coordinator()
    yield cluster
    cluster.close()
