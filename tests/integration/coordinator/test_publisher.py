"""Prompts that can't be published fail their run, with the place and the reason; media count at the gate."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from PIL import Image

from relaxd.board import AsyncBoard, NewGroup, worst_bytes
from relaxd.cli.reading.logs_command import read_group_trace
from relaxd.config import RunConfig
from relaxd.data.curriculum.run_curriculum import Curriculum
from relaxd.data.dataset import PromptDataset, RunData, load_data
from relaxd.data.examples import Example
from relaxd.data.rows import OnDemand
from relaxd.data.vision import PromptHostAway
from relaxd.media import fetching
from relaxd.media.sources import data_uri
from relaxd.reasons import DropReason
from relaxd.telemetry import spans
from relaxd.telemetry.exporters import TraceFiles
from relaxd.waiting import Backoff, waits
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.runs.publisher import Publisher
from services.coordinator.state import retries
from services.coordinator.state.retries import MEDIA_HOST
from tests.integration.coordinator.fleet_kit import FleetKit
from tests.kit.media_server import media_server
from tests.kit.models import make_tiny_model
from tests.kit.ports import free_port
from tests.kit.vision import encoded, picture, write_vision_model
from tests.kit.waiting import eventually


class Rows(OnDemand[Example]):
    """Prompts of which the third is not what the checks have seen."""

    def __init__(self, third: Callable[[], Example]) -> None:
        self._third = third

    def __len__(self) -> int:
        return 64

    def _item(self, index: int) -> Example:
        return self._third() if index == 2 else Example(f"{index} + 1?", str(index + 1))


def broken() -> Example:
    raise RuntimeError("the source is gone")


def with_bytes() -> Example:
    return Example("2 + 1?", "3", {"image": b"\x89PNG"})


def without_metadata() -> Example:
    wrong: Any = None
    return Example("2 + 1?", "3", wrong)


async def failure(
    redis_url: str,
    folder: Path,
    rows: Sequence[Example],
    first: Callable[[RunContext], Awaitable[object]] | None = None,
    told: Callable[[Publisher], str] = lambda publisher: str(publisher.failure or ""),
    sampler: str = "uniform",
) -> str:
    """Publish prompts until that fails, after `first`. Returns the run's failure, or where else it must be `told`."""
    config = RunConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": str(make_tiny_model(folder / "tiny"))},
            "data": {"source": "addition", "shuffle": False, "curriculum": {"sampler": sampler}},
            "reward": {"name": "addition"},
        }
    )
    kit = FleetKit(redis_url)
    try:
        context, data = kit.context(config), load_data(config)
        train = PromptDataset(rows, data.tokenizer, shuffle=False, seed=0)
        run_data = RunData(train, {}, 0, data.tokenizer)
        await context.board.create(term=context.term, groups_per_step=8, steps=9)
        if first is not None:
            await context.board.set_gate(term=context.term, oldest_version=0, open=True)
            await first(context)
        visits = Curriculum(config, train).visits
        publisher = Publisher(context, run_data, visits, oldest_version=lambda: 0, wanted=lambda: True)
        task = asyncio.create_task(publisher.run_forever())
        await eventually(lambda: told(publisher) or task.done(), "the failure")
        assert not task.done(), "an error here would end the coordinator"
        task.cancel()
        return told(publisher)
    finally:
        await kit.close()


@pytest.mark.parametrize(
    ("third", "reason"),
    [
        (broken, "RuntimeError: the source is gone"),
        (with_bytes, "ColumnError: "),
        (without_metadata, "AttributeError: "),
    ],
)
async def test_a_prompt_that_cannot_be_published_fails_the_run(
    redis_url: str, tmp_path: Path, third: Callable[[], Example], reason: str
) -> None:
    told = await failure(redis_url, tmp_path, Rows(third))
    assert told.startswith(f"the prompts from place (0, 0) on can't be published: {reason}")


async def test_the_gate_says_by_a_word_that_a_sampler_is_wrong(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Lost:\n    pass\n")
    limit = lambda publisher: publisher.gate[0]  # noqa: E731
    sampler = f"{tmp_path}/mine.py:Lost"
    assert await failure(redis_url, tmp_path, Rows(with_bytes), None, limit, sampler) == "sampler"


async def test_the_trace_of_a_group_names_the_media_of_its_prompt(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_vision_model(Path("model"))
    images = [data_uri(encoded(picture(64 + 32 * place, 64))) for place in range(18)]
    rows = [
        {"prompt": "What is this?", "images": []},
        {"prompt": "<image><image><image>?", "images": [images[0], images[0], images[1]]},
        {"prompt": "<image>" * 18 + "?", "images": images},
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"source": "files", "path": "rows.jsonl", "shuffle": False, "max_prompt_tokens": 500}
    config = RunConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": "model"},
            "data": {**data, "media_keys": {"image": "images"}},
            "reward": {"name": "dummy"},
        }
    )
    files, provider = TraceFiles("coordinator-0"), TracerProvider()
    files.open(tmp_path)
    provider.add_span_processor(SimpleSpanProcessor(files))
    monkeypatch.setattr(spans, "enabled", lambda: True)
    monkeypatch.setattr(spans, "tracer", lambda: provider.get_tracer("test"))
    kit = FleetKit(redis_url)
    try:
        context, loaded = kit.context(config), load_data(config)
        await context.board.create(term=context.term, groups_per_step=8, steps=9)
        visits = Curriculum(config, loaded.train).visits
        publisher = Publisher(context, loaded, visits, oldest_version=lambda: 0, wanted=lambda: True)
        task = asyncio.create_task(publisher.run_forever())
        await eventually(lambda: read_group_trace(tmp_path, "0-000002") or task.done(), "the third group's trace")
        task.cancel()
    finally:
        await kit.close()
    found = [trace.root.attributes for place in range(3) if (trace := read_group_trace(tmp_path, f"0-{place:06d}"))]
    assert "relaxd.media" not in found[0]
    media = [loaded.train.prompt(place).media.by_hash() for place in range(3)]
    names = [[f"image:{name[:12]}:{len(content)}" for name, content in one.items()] for one in media]
    assert len(names[1]) == 2
    assert len(names[2]) == 18
    assert [one["relaxd.media"] for one in found[1:]] == [names[1], names[2][:16]]


def an_open_group(context: RunContext) -> Awaitable[object]:
    group = NewGroup("0-000003", {"prompt_tokens": np.arange(3, dtype=np.int32), "prompt": {"text": "a"}})
    return context.board.publish(term=context.term, groups=[group])


def a_damaged_cursor(context: RunContext) -> Awaitable[object]:
    group = NewGroup("0-000099", {"prompt_tokens": np.arange(3, dtype=np.int32), "prompt": {"text": "a"}})
    return context.board.publish(term=context.term, groups=[group], cursor={"epoch": 0})


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (an_open_group, r"the prompts from place \(0, 0\) on can't be published: BoardError: .*0-000003"),
        (a_damaged_cursor, "the prompts can't be published: KeyError: 'position'"),
    ],
)
async def test_a_board_that_refuses_prompts_fails_the_run(
    redis_url: str, tmp_path: Path, first: Callable[[RunContext], Awaitable[object]], told: str
) -> None:
    rows = Rows(lambda: Example("2 + 1?", "3"))
    assert re.match(told, await failure(redis_url, tmp_path, rows, first))


LACKING = 4
"""Groups of a step, which the gate always lets in."""
SMALL, LARGE = 64, 256
"""Widths of pictures of 12 and 192 KiB."""


async def published_at_the_gate(
    redis_url: str, folder: Path, widths: Sequence[int], *, high_water: int, most_tokens: int, until: tuple[str, int]
) -> tuple[int, int]:
    """Publish prompts with pictures of noise until the gate is shut, for the reason and after the groups in `until`.

    Returns the number of groups and the bytes that they count with.
    """
    write_vision_model(folder / "model")
    rows = []
    for number, width in enumerate(widths):
        file = folder / f"{number}.png"
        noise = np.random.default_rng(number).integers(0, 256, (width, width, 3), np.uint8)
        file.write_bytes(encoded(Image.fromarray(noise)))
        rows.append(json.dumps({"prompt": "<image>What is here?", "images": [str(file)]}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    config = RunConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": str(folder / "model")},
            "data": {
                "source": "files",
                "path": str(folder / "rows.jsonl"),
                "shuffle": False,
                "media_keys": {"image": "images"},
                "max_prompt_tokens": most_tokens,
            },
            "reward": {"name": "dummy"},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8},
            "board": {"high_water_bytes": high_water, "max_staleness": 3},
        }
    )
    kit = FleetKit(redis_url)
    try:
        context, data = kit.context(config), load_data(config)
        await context.board.create(term=context.term, groups_per_step=LACKING, steps=9)
        visits = Curriculum(config, data.train).visits
        publisher = Publisher(context, data, visits, oldest_version=lambda: 0, wanted=lambda: True)
        state = f"{context.board.prefix}state"
        task = asyncio.create_task(publisher.run_forever())
        with redis.Redis.from_url(redis_url) as client:
            counted = lambda: map(int, client.hmget(state, "published", "stored_bytes", "reserved_bytes"))  # noqa: E731
            limit, least = until
            shut = lambda: publisher.gate[0] == limit and next(counted()) >= least  # noqa: E731
            await eventually(lambda: shut() or task.done(), "the gate")
            task.cancel()
            published, stored, reserved = counted()
        assert publisher.failure is None
        prompts = [data.train.prompt(index) for index in range(published)]
        assert all(len(one.media.contents) > 3 * width**2 for one, width in zip(prompts, widths, strict=False))
        worst = sum(worst_bytes(config, len(one.tokens)) + len(one.media.contents) for one in prompts)
        assert stored + reserved == worst
        return published, stored + reserved
    finally:
        await kit.close()


async def test_a_prompt_that_is_tried_again_has_the_picture_of_its_first_try(redis_url: str, tmp_path: Path) -> None:
    """Although its file has changed, so that a later visit would publish another one."""
    write_vision_model(tmp_path / "model")
    file = tmp_path / "a.png"
    file.write_bytes(encoded(picture(64, 64)))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>What is it?", "images": [str(file)]}))
    data = {"source": "files", "path": str(tmp_path / "rows.jsonl"), "media_keys": {"image": "images"}}
    config = RunConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": str(tmp_path / "model")},
            "data": data,
            "reward": {"name": "dummy"},
            "board": {"max_staleness": 0},
        }
    )
    kit = FleetKit(redis_url)
    try:
        context, loaded = kit.context(config), load_data(config)
        board = context.board
        await board.create(term=context.term, groups_per_step=1, steps=9)

        async def published(name: str, train: PromptDataset) -> dict[str, Any]:
            visits = Curriculum(config, train).visits
            run_data = RunData(train, {}, 0, loaded.tokenizer)
            publisher = Publisher(context, run_data, visits, oldest_version=lambda: 0, wanted=lambda: True)
            task = asyncio.create_task(publisher.run_forever())
            (delivery,) = await board.take("rollout", name, count=1, block_seconds=10)
            task.cancel()
            (columns,) = await board.load([delivery], ("prompt_media", "media_contents"))
            assert columns is not None
            return {**columns, "id": delivery.group_id}

        first = await published("one", loaded.train)
        file.write_bytes(encoded(picture(64, 64, 1)))
        await board.drop_groups([first["id"]], term=context.term, reason=DropReason.MEMORY, retry=True)
        changed = load_data(config).train
        again = await published("two", changed)
    finally:
        await kit.close()
    assert again["id"] == f"{first['id']}~1"
    assert again["prompt_media"] == first["prompt_media"]
    assert bytes(again["media_contents"]) == bytes(first["media_contents"])
    assert changed.prompt(0).media.records[0]["sha256"] != first["prompt_media"][0]["sha256"]


@asynccontextmanager
async def publishing_of_a_host(
    redis_url: str, folder: Path, port: int, wanted: Callable[[], bool] = lambda: True, **settings: Any
) -> AsyncIterator[tuple[Publisher, AsyncBoard, RunData]]:
    """Publish three prompts with pictures of a host, which answered while they were checked."""
    write_vision_model(folder / "model")
    urls = [f"http://127.0.0.1:{port}/{number}.png" for number in range(3)]
    rows = [json.dumps({"prompt": "<image>What is here?", "images": [url]}) for url in urls]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    data = {"source": "files", "path": str(folder / "rows.jsonl"), "shuffle": False, "media_keys": {"image": "images"}}
    config = RunConfig.model_validate(
        {
            "run": {"steps": 9},
            "model": {"path": str(folder / "model")},
            "data": data | {"media_hosts": [f"127.0.0.1:{port}"], **settings},
            "reward": {"name": "dummy"},
            "board": {"max_staleness": 0},
        }
    )
    kit = FleetKit(redis_url)
    try:
        with pictures_at(port):
            context, loaded = kit.context(config), load_data(config)
        await context.board.create(term=context.term, groups_per_step=3, steps=9)
        visits = Curriculum(config, loaded.train).visits
        publisher = Publisher(context, loaded, visits, oldest_version=lambda: 0, wanted=wanted)
        task = asyncio.create_task(publisher.run_forever())
        yield publisher, context.board, loaded
        assert not task.done(), "an error here would end the coordinator"
        task.cancel()
    finally:
        await kit.close()


@contextmanager
def pictures_at(port: int, count: int = 3) -> Iterator[None]:
    with media_server(port, {f"{number}.png": encoded(picture(64, 64, number)) for number in range(count)}):
        yield


def waits_for_hosts() -> list[str]:
    return [wait.reason for wait in waits() if wait.on == MEDIA_HOST]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "BACKOFF", Backoff(0.01))
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.01)


async def test_publishing_waits_for_a_media_host_that_is_away(redis_url: str, tmp_path: Path, soon: None) -> None:
    port = free_port()
    async with publishing_of_a_host(redis_url, tmp_path, port) as (publisher, board, data):
        await eventually(waits_for_hosts, "the wait")
        (reason,) = waits_for_hosts()
        assert f'line 1: "images"[0] is a URL of 127.0.0.1:{port}, which can\'t be fetched, 3 times' in reason
        assert (await board.counts()).published == 0
        with pictures_at(port):
            deliveries = await board.take("rollout", "one", count=3, block_seconds=20)
            found = await board.load(deliveries, ("prompt_media",))
        assert waits_for_hosts() == []
        assert publisher.failure is None
        shown = [columns["prompt_media"] for columns in found if columns is not None]
        assert shown == [list(data.train.prompt(index).media.records) for index in range(3)]


async def test_a_pause_ends_the_wait_for_a_media_host(redis_url: str, tmp_path: Path, soon: None) -> None:
    port, wanted = free_port(), [True]
    async with publishing_of_a_host(redis_url, tmp_path, port, wanted=lambda: bool(wanted)) as (publisher, board, _):
        await eventually(waits_for_hosts, "the wait")
        wanted.clear()
        await eventually(lambda: not waits_for_hosts(), "its end")
        assert publisher.failure is None
        assert (await board.counts()).published == 0
        wanted.append(True)
        with pictures_at(port):
            assert len(await board.take("rollout", "one", count=3, block_seconds=20)) == 3


async def test_a_media_host_without_an_item_fails_the_run(redis_url: str, tmp_path: Path, soon: None) -> None:
    port = free_port()
    async with publishing_of_a_host(redis_url, tmp_path, port) as (publisher, _, _):
        await eventually(waits_for_hosts, "the wait")
        with pictures_at(port, count=1):
            await eventually(lambda: publisher.failure, "the failure")
    assert str(publisher.failure).endswith("which can't be fetched: HTTP 404")
    assert "line 2" in str(publisher.failure)
    assert waits_for_hosts() == []


async def test_a_media_host_that_stays_away_fails_the_run(redis_url: str, tmp_path: Path, soon: None) -> None:
    async with publishing_of_a_host(redis_url, tmp_path, free_port(), media_wait_seconds=0.5) as (publisher, _, _):
        await eventually(waits_for_hosts, "the wait")
        await eventually(lambda: publisher.failure, "the failure")
    assert publisher.failure is not None
    assert isinstance(publisher.failure.__cause__, PromptHostAway)


async def test_the_gate_counts_the_media_of_prompts(redis_url: str, tmp_path: Path) -> None:
    """The gate lets only the groups that the open step lacks pass: their pictures alone exceed the mark."""
    sizes = {"high_water": LACKING * 128 * 1024, "most_tokens": 128}
    found = await published_at_the_gate(redis_url, tmp_path, [LARGE] * 16, **sizes, until=("memory", LACKING))
    assert found[0] == LACKING


async def test_the_gate_expects_pictures_as_large_as_those_before(redis_url: str, tmp_path: Path) -> None:
    """Prompts of up to 4096 tokens could have 13 MB each: with these only a step's groups would come in."""
    sizes = {"high_water": 8 << 20, "most_tokens": 4096}
    found = await published_at_the_gate(redis_url, tmp_path, [SMALL] * 16, **sizes, until=("staleness", 16))
    assert found[0] == 16


async def test_the_gate_lets_no_larger_pictures_in_than_there_is_room_for(redis_url: str, tmp_path: Path) -> None:
    """Those after the first step's are larger: all together are refused, and as many come in as fit."""
    widths, sizes = [SMALL] * LACKING + [LARGE] * 12, {"high_water": 2 << 20, "most_tokens": 4096}
    published, counted = await published_at_the_gate(
        redis_url, tmp_path, widths, **sizes, until=("memory", LACKING + 1)
    )
    assert published < 16
    assert counted <= sizes["high_water"]
