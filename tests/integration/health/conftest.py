"""Clusters with faulty services."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.health.kit import HealthCluster
from tests.kit.tokenizer import write_tokenizer


@pytest.fixture
def cluster(tmp_path: Path, redis_url: str) -> Iterator[HealthCluster]:
    """A cluster with only a starting coordinator."""
    cluster = HealthCluster(tmp_path, redis_url, write_tokenizer(tmp_path / "model"))
    cluster.coordinator()
    yield cluster
    cluster.close()
