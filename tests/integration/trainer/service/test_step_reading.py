"""One rank of each data-parallel index reads a step's groups, and the others get them from it, or its error."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.integration.trainer.service.reading_worlds import FaultJob, StepJob
from tests.integration.trainer.service_kit import Feeder, make_config
from tests.integration.trainer.trainer_worlds import run_named
from tests.kit.redis.redis_server import RedisServer

pytestmark = pytest.mark.slow

ONE_UPDATE: dict[str, Any] = {}
SEVERAL: dict[str, Any] = {"mini_batches": 2, "epochs": 2}
STEPS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2, **ONE_UPDATE},
    "PP2": {"pipeline_parallel": 2, **SEVERAL},
    "CP2": {"context_parallel": 2, **SEVERAL},
    "TP2 PP2": {"tensor_parallel": 2, "pipeline_parallel": 2, **SEVERAL},
    "DP4": {**SEVERAL},
}
GROUPS = [f"g{number}" for number in range(1, 13)]
"""More than a rank loads in one call."""


@pytest.fixture(scope="module")
def worlds(
    session_redis: RedisServer, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The results of all ranks, by job."""
    folder = tmp_path_factory.mktemp("worlds")
    with contextlib.closing(redis.Redis.from_url(session_redis.url)) as client:
        client.flushall()
    jobs: dict[str, StepJob] = {}
    for name, trainer in {**STEPS, "faults": STEPS["TP2"], "late": STEPS["PP2"]}.items():
        trainer = {"ranks": 4, "groups_per_step": len(GROUPS), "micro_batch_tokens": 48, **trainer}
        config = make_config(tiny_qwen3, trainer=trainer, algorithm={"old_logprobs": "current"})
        url = session_redis.url.removesuffix("/0") + f"/{len(jobs) + 1}"
        feeder = Feeder(url, config)
        for index in range(len(GROUPS)):
            feeder.feed(1, 0, length=4 + index % 7)
        feeder.board.close()
        late = 3 if name == "late" else 0
        jobs[name] = (FaultJob if name == "faults" else StepJob)(config, url, folder, late)
    return run_named(jobs, 4, folder / "ranks")


@pytest.mark.parametrize("name", STEPS)
def test_each_group_is_read_once_for_all_ranks_that_work_on_it(
    worlds: dict[str, list[dict[str, Any]]], name: str
) -> None:
    ranks = worlds[name]
    of_rank_0 = ranks[0]["checksums"]
    assert sorted(of_rank_0) == sorted(GROUPS)
    for rank in ranks:
        (reader,) = (other for other in ranks if other["dp_rank"] == rank["dp_rank"] and other["reads"])
        if rank is not reader:
            assert rank["loaded"] == []
        assert len(reader["loaded"]) == len(set(reader["loaded"]))
        assert rank["checksums"].keys() <= set(reader["loaded"])
        assert rank["checksums"].items() <= of_rank_0.items(), "the same bytes, however they came"
        assert rank["trained"] == reader["trained"]
        assert rank["trained"]
    assert ranks[0]["reads"]
    assert sorted(ranks[0]["loaded"]) == sorted(GROUPS), "which it took: it reads none of them again"
    assert len({rank["dp_rank"] for rank in ranks}) == sum(rank["reads"] for rank in ranks)


def test_a_group_that_another_rank_was_to_train_on_is_read_again(worlds: dict[str, list[dict[str, Any]]]) -> None:
    ranks = worlds["late"]
    for rank in ranks:
        (reader,) = (other for other in ranks if other["dp_rank"] == rank["dp_rank"] and other["reads"])
        assert rank["checksums"].items() <= ranks[0]["checksums"].items()
        assert rank["trained"] == reader["trained"]
        assert rank["trained"]
        assert rank is reader or rank["loaded"] == []
    assert any(len(rank["loaded"]) > len(set(rank["loaded"])) for rank in ranks), "the first division was another one"


def test_what_the_reader_gets_or_lacks_reaches_all_ranks(worlds: dict[str, list[dict[str, Any]]]) -> None:
    everything, without_the_first = sorted(GROUPS), sorted(GROUPS[1:])
    expected = [
        everything,
        everything,  # Redis came back in time
        "ColumnError: stored bytes do not match",
        "MalformedGroup: column tokens is missing",
        "LedgerTrimmed: not one argument, but two",
        everything,
        "BoardUnavailable: Redis is away",
        without_the_first,
    ]
    for rank in worlds["faults"]:
        if rank["reads"]:
            assert rank["outcomes"] == expected
            assert rank["loaded"]
        else:
            told = [*expected, "gave up"]
            for fault in (2, 3, 4, 6):
                told[fault] = f"RuntimeError: {told[fault]}"
            assert rank["outcomes"] == told
            assert not rank["loaded"]
