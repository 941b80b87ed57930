"""The service of a host's ranks as a process: what it refuses, and how attempts end each other."""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from relaxd import __version__
from relaxd.replica.gpus import GpuLeases
from relaxd.rpc.client import sync_channel
from relaxd.rpc.errors import FailedPrecondition, failed_precondition
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import ranks_pb2, ranks_pb2_grpc
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from services.trainer.ranks import RanksService
from tests.integration.trainer.hosts.host_kit import Host, HostsCoordinator
from tests.integration.trainer.service_kit import BEGUN, RUN_ID, make_config, mark_folder
from tests.kit.models import make_tiny_model
from tests.kit.redis.redis_server import RedisServer
from tests.kit.waiting import eventually


class Lifeline:
    """A trainer's stream to a host."""

    def __init__(self, stub: ranks_pb2_grpc.RanksStub, start: ranks_pb2.RanksStart) -> None:
        self._requests: Queue[ranks_pb2.StartRanksRequest | None] = Queue()
        self._requests.put(ranks_pb2.StartRanksRequest(start=start))
        self._responses = stub.StartRanks(iter(self._requests.get, None), timeout=60)

    def next(self) -> ranks_pb2.StartRanksResponse:
        response: ranks_pb2.StartRanksResponse = next(self._responses)
        return response

    def failure(self) -> str:
        """Return the reason with which the host ends the attempt."""
        return next(response.failed.reason for response in self._responses if response.HasField("failed"))

    def close(self) -> None:
        self._requests.put(None)
        self._responses.cancel()


@pytest.fixture(scope="module")
def host(session_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    """Yield a channel to a host's service that has a run."""
    folder = tmp_path_factory.mktemp("run")
    model = make_tiny_model(folder / "model", architecture="qwen3")
    coordinator = HostsCoordinator(make_config(model, trainer={"ranks": 2, "hosts": 2}), folder)
    service = Host(1, coordinator, session_redis.url, None)
    coordinator.wait(lambda: coordinator.host_is("ranks-1", REPLICA_STATE_READY))
    (folder / "mark").touch()
    with sync_channel(coordinator.hosts["ranks-1"].address) as channel:
        yield channel
    service.kill()
    coordinator.close()


ATTEMPTS = count(5)
"""Numbers of attempts, which grow."""


def start_with(**changes: Any) -> ranks_pb2.RanksStart:
    """Return a start that is right, with changes."""
    start = ranks_pb2.RanksStart(
        attempt=next(ATTEMPTS), trainer_id="trainer-1", package_version=__version__, run_id=RUN_ID, mark="mark",
        first_rank=1, ranks=1, store_host="127.0.0.1", store_port=1,
    )  # fmt: skip
    start.begin_time.FromDatetime(BEGUN)
    start.MergeFrom(ranks_pb2.RanksStart(**changes))
    return start


@pytest.fixture
def lifelines(host: grpc.Channel) -> Iterator[Any]:
    """Yield a function that opens a lifeline (`start_with`)."""
    opened = []

    def lifeline(**changes: Any) -> Lifeline:
        opened.append(Lifeline(ranks_pb2_grpc.RanksStub(host), start_with(**changes)))
        return opened[-1]

    yield lifeline
    for one in opened:
        one.close()


def refusal(lifeline: Lifeline) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        lifeline.next()
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return raised.value


def test_a_host_takes_part_in_newer_attempts_only(lifelines: Any) -> None:
    number = next(ATTEMPTS)
    first = lifelines(attempt=number)
    assert first.next() == ranks_pb2.StartRanksResponse()
    older = refusal(lifelines(attempt=number - 1))
    assert failed_precondition(older, "ATTEMPT_SUPERSEDED") == str(number)
    assert older.details() == f"attempt {number - 1} of trainer-1 is over: ranks-1 knows attempt {number}"
    newest = next(ATTEMPTS)
    newer = lifelines(attempt=newest, trainer_id="trainer-2")
    assert newer.next() == ranks_pb2.StartRanksResponse()
    assert first.failure() == f"attempt {newest} of trainer-2 has begun"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"package_version": "0.0.1"}, f"ranks-1 has relaxd {__version__}, and trainer-1 has 0.0.1"),
        ({"run_id": "other"}, "ranks-1 doesn't work on run other as it began last"),
        ({"store_host": "255.255.255.255"}, "ranks-1 finds no way to 255.255.255.255: [Errno 13] Permission denied"),
        ({"ranks": 2}, "ranks-1 has 1 ranks by the run's settings, not 2"),
        pytest.param({"mark": "another"}, "mount the same folder on all hosts", marks=pytest.mark.slow),
    ],
)
def test_a_host_refuses_what_does_not_fit_it_in_words(lifelines: Any, changes: dict[str, Any], told: str) -> None:
    assert told in str(refusal(lifelines(**changes)).details())


@pytest.mark.slow
def test_a_host_ends_the_ranks_of_a_silent_trainer(lifelines: Any) -> None:
    silent = lifelines()
    silent.next()
    assert silent.failure() == "trainer-1 has been silent for 5 s"


async def test_a_host_that_leaves_its_run_has_no_ranks_of_a_start_that_it_was_checking(tmp_path: Path) -> None:
    mark_folder(tmp_path)
    settings = ServiceSettings(role="ranks", replica_id="ranks-1")
    context: Any = SimpleNamespace(settings=settings, gpus=GpuLeases("ranks-1", [], SimpleNamespace()))  # type: ignore[arg-type]
    service, assignment = RanksService(context), Assignment(run_id=RUN_ID, folder=str(tmp_path))
    assignment.begin_time.FromDatetime(BEGUN)
    await service.start_run(make_config(tmp_path, trainer={"ranks": 2, "hosts": 2}), assignment)
    starting = asyncio.create_task(service.begin(start_with()))
    await eventually(service._changing.locked, "the start is checked")
    leaving = asyncio.create_task(service.stop_run())
    await asyncio.sleep(0)
    (tmp_path / "mark").touch()
    attempt = await starting
    await leaving
    assert attempt.responses.get_nowait().failed.reason == "ranks-1 leaves the run"
    assert all(rank.child.exited.done() for rank in attempt.ranks)
    assert service.status().gauges == {"ranks": 0.0}
    with pytest.raises(FailedPrecondition, match="doesn't work on run"):
        await service.begin(start_with())
