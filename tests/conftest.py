"""Fixtures for every test: a real Redis (Valkey), shared by the session or one of your own that may die."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis

# Asserts in what tests share say their values, too.
pytest.register_assert_rewrite(
    *(f"tests.{name}" for name in ("kit", "unit", "integration", "e2e", "compose", "gpu", "chaos"))
)

from tests.kit.redis.redis_server import RedisServer  # noqa: E402
from tests.kit.waiting import PATIENCE  # noqa: E402
from tests.warm import programs  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Start the nurseries that programs are forked from (`tests/warm`)."""
    if not hasattr(config, "workerinput"):  # else this process is xdist's, and the nurseries have been started
        of_all_tests = config.args_source is config.ArgsSource.TESTPATHS
        nurseries = programs.nurseries(workers=of_all_tests and bool(config.getoption("numprocesses", 0)))
        nurseries.__enter__()
        config.add_cleanup(lambda: nurseries.__exit__(None, None, None))
        if of_all_tests:  # because collecting takes long
            programs.begin_imports()
    programs.show_parents()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply the time that each test may take by PATIENCE."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * PATIENCE), append=False)


def pytest_collection_finish() -> None:
    """Leave what is there by now out of searches for garbage, which took seconds: every trainer in a test makes two."""
    gc.collect()
    programs.freeze_for_good()


@pytest.fixture(scope="session")
def session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The session's server; tests use `redis_url`."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(session_redis: RedisServer) -> str:
    """URL of a real Redis that is empty at the start of the test."""
    with contextlib.closing(redis.Redis.from_url(session_redis.url, socket_timeout=10.0)) as client:
        client.flushall()
        client.script_flush()
    return session_redis.url


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Factory of servers of the test's own: `redis_server(append_only=True)` starts one; all end with the test."""
    servers: list[RedisServer] = []

    def make(*, append_only: bool = True, options: Sequence[str] = ()) -> RedisServer:
        folder = tmp_path / f"redis-{len(servers)}"
        folder.mkdir()
        servers.append(RedisServer(folder, append_only=append_only, options=options).start())
        return servers[-1]

    yield make
    for server in servers:
        server.kill()
