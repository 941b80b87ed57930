"""A coordinator and its replicas, each with a token of its own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import Cluster
from tests.kit.processes import ROOT
from tests.kit.redis.redis_server import RedisServer
from tests.kit.tokenizer import write_tokenizer


class Tokens:
    """The folder that deploy/secrets.sh writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([ROOT / "deploy" / "secrets.sh", folder], check=True, capture_output=True, timeout=60)

    def __getitem__(self, role: str) -> str:
        return (self.folder / f"{role}.token").read_text().strip()

    def environment(self, role: str) -> dict[str, str]:
        """Settings of a role's service."""
        files = {"RELAXD_TOKENS_FILE": self.folder / "tokens", "RELAXD_TOKEN_FILE": self.folder / f"{role}.token"}
        return {name: str(file) for name, file in files.items()} | {"RELAXD_TOKEN": ""}


class Guarded(Cluster):
    """A cluster whose processes have the tokens of their roles; this process has an admin's."""

    tokens: Tokens

    def start(self, name: str, module: str, *arguments: str, **environment: str) -> None:
        super().start(name, module, *arguments, **self.tokens.environment(name), **environment)


@contextmanager
def guarded_cluster(folder: Path) -> Iterator[Guarded]:
    """A coordinator that is up, with files in `folder`."""
    (folder / "redis").mkdir()
    redis = RedisServer(folder / "redis").start()
    with pytest.MonkeyPatch.context() as patch:
        Guarded.tokens = Tokens(folder / "secrets")
        patch.setenv("RELAXD_TOKEN", Guarded.tokens["admin"])
        cluster = Guarded(folder, redis.url, write_tokenizer(folder / "model"))
        try:
            cluster.coordinator()
            cluster.until("up", lambda: cluster.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)
            yield cluster
        finally:
            cluster.close()
            redis.kill()
