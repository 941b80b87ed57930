"""Runs that are started, deleted and restored while Redis or a caller is gone at the wrong moment."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import redis

from relaxd.media import fetching
from relaxd.redis_client import key_prefix
from relaxd.rpc.errors import FailedPrecondition, ResourceExhausted
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.rpc.tls import TlsFiles
from relaxd.waiting import Backoff, waiting, waits
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.runs.run_manager import RunManager
from services.coordinator.state import retries
from services.coordinator.state.records import Phase, RunRecord
from services.coordinator.state.store import AsyncStore, Store, StoreUnavailable, run_key
from tests.kit.disks import full_disk
from tests.kit.media_server import media_server
from tests.kit.ports import free_port
from tests.kit.redis.redis_server import RedisServer
from tests.kit.tokenizer import write_tokenizer
from tests.kit.vision import encoded, picture, write_vision_model
from tests.kit.waiting import eventually


class Desk:
    """A coordinator's runs, without replicas: a run waits for them until it is stopped."""

    def __init__(self, redis_url: str, folder: Path, stack: str = "") -> None:
        self.folder = folder
        self.stack = stack
        self.model = write_tokenizer(folder / "model")
        self.store = Store(redis_url)
        self.store.take_over()
        self.its_store = AsyncStore(self.store)
        registry = Registry(self.its_store, lease_seconds=60, heartbeat_seconds=1.0, gpu_lease_seconds=60)
        self.peers = Peers(None, TlsFiles(), self.store.term)
        self.errors: list[BaseException] = []
        settings = ServiceSettings(role="coordinator", redis=redis_url, stack=stack)
        self.manager = RunManager(self.its_store, registry, self.peers, settings, self.errors.append)
        self.redis = redis.Redis.from_url(redis_url)

    def config(self, folder: str, data: str = 'source = "addition"') -> str:
        """Return a configuration as TOML; the run's folder is below `folder`."""
        return (
            f'[run]\nsteps = 1\nfolder = "{self.folder / folder}"\n[model]\npath = "{self.model}"\n'
            f'[data]\n{data}\n[reward]\nname = "addition"\n'
        )

    async def start(self, folder: str, **data: str) -> None:
        """Start the run "again" and wait until its board is there."""
        await self.manager.start("again", self.config(folder, **data))
        await eventually(lambda: self.manager.active is not None and self.manager.active.assignable, "it begins", 20.0)

    async def stop(self) -> None:
        """Stop the active run and wait for its end."""
        assert self.manager.active is not None
        await self.manager.active.stop("enough")
        await eventually(lambda: self.manager.active is None, "it ends", 20.0)

    async def close(self) -> None:
        """End it as a coordinator ends."""
        await self.manager.close()
        await self.peers.close()
        await self.its_store.close()
        self.redis.close()

    def keys(self) -> list[bytes]:
        """Return the keys of the run "again"."""
        return sorted(self.redis.keys(key_prefix("again") + "*"))


@pytest.fixture
async def desk(redis_url: str, tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(redis_url, tmp_path)
    yield desk
    await desk.close()
    assert not desk.errors


def lose_first_answer(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the answer to the first creation of a run be lost, after Redis has done it."""
    create, lost = desk.its_store.create_run, []

    async def lossy(run: RunRecord) -> None:
        await create(run)
        if not lost:
            lost.append(run)
            raise StoreUnavailable("Redis doesn't answer")

    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(desk.its_store, "create_run", lossy)


async def test_a_run_whose_creation_redis_did_not_answer_is_driven(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_first_answer(desk, monkeypatch)
    await desk.start("first")
    assert desk.store.active_run_id() == "again"


async def test_a_restored_run_whose_creation_redis_did_not_answer_is_driven(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.start("first")
    await desk.stop()
    lose_first_answer(desk, monkeypatch)
    active = await desk.manager.restore(str(desk.folder / "first" / "again"), steps=2)
    assert desk.manager.active is active
    assert desk.store.active_run_id() == "again"


async def test_looking_at_a_run_again_and_again_takes_no_memory(desk: Desk) -> None:
    await desk.start("first")
    assert desk.manager.active is not None
    record, process = desk.manager.active.record, psutil.Process()
    size = (await desk.manager.message(record)).ByteSize()

    async def look(times: int) -> int:
        for _ in range(times):
            await desk.manager.message(record)
        return int(process.memory_info().rss)

    before = await look(200)
    assert await look(1000) - before < 500 * size


async def test_a_run_that_is_extended_on_a_full_disk_stays_as_it_is(desk: Desk) -> None:
    await desk.start("first")
    await desk.stop()
    folder, before = desk.folder / "first" / "again", desk.keys()
    config = (folder / "config.toml").read_bytes()
    with full_disk(), pytest.raises(ResourceExhausted, match=r"can't be written to: .*File too large.*make room"):
        await desk.manager.restore(str(folder), steps=2)
    assert desk.store.active_run_id() is None
    assert desk.keys() == before
    assert (folder / "config.toml").read_bytes() == config
    assert (await desk.manager.restore(str(folder), steps=2)).record.run_id == "again"


async def test_a_deletion_that_was_not_ended_leaves_the_next_run_of_that_id_alone(desk: Desk) -> None:
    await desk.start("first")
    await desk.stop()
    desk.store.begin_delete("again")  # then a Redis with some of its data was away
    await desk.start("second")
    assert desk.store.deleting() == []
    before = desk.keys()
    await desk.manager.delete_expired()
    assert desk.keys() == before
    assert desk.store.run("again") is not None


async def test_a_restored_run_is_left_alone_by_an_earlier_deletion(desk: Desk) -> None:
    await desk.start("first")
    await desk.stop()
    desk.store.begin_delete("again")
    await desk.manager.restore(str(desk.folder / "first" / "again"), steps=2)
    await desk.manager.delete_expired()
    assert desk.store.run("again") is not None
    assert desk.manager.active is not None


async def test_a_run_whose_record_is_gone_is_not_listed(desk: Desk) -> None:
    await desk.start("first")
    await desk.stop()
    desk.redis.delete(run_key("again"))
    assert await desk.manager.all() == []
    await desk.manager.delete_expired()


async def test_a_run_is_not_shown_as_the_one_of_its_id_that_ended(desk: Desk) -> None:
    await desk.start("first")
    await desk.stop()
    ended = await desk.manager.message(await desk.manager.record("again"))
    desk.store.begin_delete("again")
    await desk.start("second")
    started = await desk.manager.message(await desk.manager.record("again"))
    assert started.state != ended.state
    assert started.folder == str(desk.folder / "second" / "again")


async def test_a_deletion_is_ended_although_its_caller_is_gone(desk: Desk) -> None:
    await desk.start("first")
    await desk.stop()
    desk.redis.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    calling = asyncio.create_task(desk.manager.delete("again"))
    await eventually(lambda: desk.redis.info("clients")["blocked_clients"] > 0, "Redis holds a write up", 20.0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    desk.redis.execute_command("CLIENT", "UNPAUSE")
    await eventually(lambda: not desk.keys() and not desk.store.deleting(), "everything is deleted", 20.0)


async def test_a_run_that_has_ended_waits_for_nothing_but_its_disk(desk: Desk) -> None:
    await desk.start("first")
    active = desk.manager.active
    assert active is not None
    await active.waiting.look()
    said = (await desk.manager.message(active.record)).waiting_for
    assert said.startswith("no trainer, rollout, reward or advantage replica is registered")
    ended = active.record.model_copy(update={"phase": Phase.STOPPED})
    with waiting("a reply", on="another process"):
        assert (await desk.manager.message(ended)).waiting_for == ""
    with waiting("the disk", disk=True):
        assert (await desk.manager.message(ended)).waiting_for


async def test_a_coordinator_that_restarts_waits_for_a_media_host(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "BACKOFF", Backoff(0.01))
    port, desks = free_port(), [Desk(redis_url, tmp_path)]
    desks[0].model = write_vision_model(tmp_path / "seeing")
    files = {"a.png": encoded(picture(64, 64))}
    url = f"http://127.0.0.1:{port}/a.png"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>?", "answer": "1", "images": [url]}))
    data = (
        f'source = "files"\npath = "{tmp_path / "rows.jsonl"}"\nmedia_keys = {{image = "images"}}\n'
        f'media_hosts = ["127.0.0.1:{port}"]'
    )
    try:
        with media_server(port, files):
            await desks[0].start("first", data=data)
        await desks[0].manager.close()
        desks.append(Desk(redis_url, tmp_path))
        resuming = asyncio.create_task(desks[1].manager.resume())
        waits_for_it = lambda: any(f"(127.0.0.1:{port}), for run again: " in wait.reason for wait in waits())  # noqa: E731
        await eventually(lambda: waits_for_it() or resuming.done(), "the wait")
        assert not resuming.done()
        with media_server(port, files):
            await asyncio.wait_for(resuming, 20.0)
        assert not waits_for_it()
        active = desks[1].manager.active
        assert active is not None
        assert active.record.phase == Phase.PENDING
    finally:
        for desk in desks:
            await desk.close()


async def test_one_of_two_stacks_gets_a_folder_that_both_open(
    redis_server: Callable[..., RedisServer], tmp_path: Path
) -> None:
    desks = [Desk(redis_server(append_only=False).url, tmp_path, stack) for stack in ("one-1", "two-2")]

    async def winner(*opening: Awaitable[object], reason: str) -> Desk:
        """Return the one that opens the folder, once the other has named it."""
        found = await asyncio.gather(*opening, return_exceptions=True)
        (error,) = [one for one in found if isinstance(one, FailedPrecondition)]
        (won,) = [desk for desk, one in zip(desks, found, strict=True) if one is not error]
        assert error.reason == reason
        assert won.manager.active is not None
        assert f"stack {won.stack}" in error.message.replace("'", "")
        return won

    try:
        begun = [desk.manager.start("again", desk.config("first")) for desk in desks]
        await (await winner(*begun, reason="FOLDER_IN_USE")).stop()
        folder = str(tmp_path / "first" / "again")
        await winner(*[desk.manager.restore(folder, steps=2) for desk in desks], reason="STACK_MISMATCH")
    finally:
        for desk in desks:
            await desk.close()
