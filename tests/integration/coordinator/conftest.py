"""Clusters for tests of the coordinator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.coordinator.cluster import Cluster
from tests.kit.redis.redis_server import RedisServer
from tests.kit.tokenizer import write_tokenizer


@pytest.fixture
def cluster(tmp_path: Path, redis_url: str) -> Iterator[Cluster]:
    """A cluster with only a starting coordinator."""
    cluster = Cluster(tmp_path, redis_url, write_tokenizer(tmp_path / "model"))
    cluster.coordinator()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator without replicas, shared by tests that leave no run behind."""
    folder = tmp_path_factory.mktemp("cluster")
    redis_folder = folder / "redis"
    redis_folder.mkdir()
    redis = RedisServer(redis_folder).start()
    cluster = Cluster(folder, redis.url, write_tokenizer(folder / "model"))
    cluster.coordinator()
    yield cluster
    cluster.close()
    redis.kill()
