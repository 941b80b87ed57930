"""Clusters with a launcher."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.scaling.kit import ScalingCluster
from tests.kit.tokenizer import write_tokenizer


@pytest.fixture
def cluster(tmp_path: Path, redis_url: str) -> Iterator[ScalingCluster]:
    """A cluster with only a starting coordinator."""
    cluster = ScalingCluster(tmp_path, redis_url, write_tokenizer(tmp_path / "model"))
    cluster.coordinator()
    yield cluster
    cluster.close()
