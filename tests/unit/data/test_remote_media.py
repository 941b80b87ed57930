"""Prompts whose media are at http(s) addresses: `relaxd data`, what runs publish of them, and what they refuse."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.config.load_toml import load_file
from relaxd.data import vision as data_vision
from relaxd.data.dataset import RunData, load_data
from relaxd.data.examples import Example
from relaxd.data.tokenizer import MEASURING_THREADS
from relaxd.data.vision import MediaAhead, PromptHostAway, read_vision
from relaxd.media import fetching
from relaxd.media.images import normalise_image
from relaxd.media.placeholders import MediaItem
from relaxd.media.prompt_media import PromptMedia
from relaxd.media.videos import normalise_video
from relaxd.models import DataError
from relaxd.waiting import Backoff
from tests.kit.media_server import MediaServer, media_server
from tests.kit.vision import encoded, picture, write_vision_model
from tests.kit.waiting import wait_until

RUN = """
run.steps = 1
model.path = "model"
reward.name = "dummy"
[data]
source = "files"
path = "rows.jsonl"
max_prompt_tokens = 100
media_keys = { image = "images", video = "videos" }
"""
PNG, OTHER = encoded(picture(100, 60)), encoded(picture(60, 100, seed=1))


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MediaServer]:
    monkeypatch.chdir(tmp_path)
    write_vision_model(Path("model"))
    Path("run.toml").write_text(RUN)
    with media_server() as one:
        one.files = {"a.png": PNG, "b.png": OTHER}
        yield one


def rows(*found: dict[str, Any]) -> None:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, found)))


def loaded(*settings: str) -> RunData:
    return load_data(load_file(Path("run.toml"), [f"--data.{one}" for one in settings]))


def test_items_at_addresses_are_those_of_files(server: MediaServer) -> None:
    url = f"http://me:secret@{server.host}"
    rows(
        {"prompt": "<image>or <image>?", "images": [f"{url}/a.png?key=secret", {"path": f"{url}/b.png"}]},
        {"prompt": "<video>Who?", "videos": [[f"{url}/a.png", f"{url}/a.png"]]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{url}/b.png"}}]}]},
    )
    allowed = f'media_hosts=["{server.host}"]'
    config = load_file(Path("run.toml"), [f"--data.{allowed}"])
    vision, train = read_vision(Path("model"), config.data), load_data(config).train
    first, other = (normalise_image(one, vision.rule) for one in (PNG, OTHER))
    assert vision.video is not None
    expected = [[first, other], [normalise_video([PNG, PNG], vision.video)], [other]]
    assert [train.prompt(index).media for index in range(3)] == list(map(PromptMedia.of, expected))
    done = CliRunner().invoke(app, ["data", "run.toml", f"--data.{allowed}"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert '"images"[1]' in done.output
    assert "secret" not in done.output


@pytest.mark.parametrize("command", [["data", "run.toml"], ["config", "check", "run.toml"]], ids=lambda one: one[0])
def test_addresses_are_refused_unless_their_host_is_allowed(command: list[str], server: MediaServer) -> None:
    rows({"prompt": "Hi"}, {"prompt": "<image>?", "images": [f"http://me:secret@{server.host}/a.png?key=secret"]})
    done = CliRunner().invoke(app, command)
    told = " ".join((done.output + str(done.exception)).split())
    assert done.exit_code != 0
    assert f'rows.jsonl line 2: "images"[0] is a URL of {server.host}: items are only fetched from hosts that' in told
    assert f'data.media_hosts names, so add "{server.host}" to it' in told
    assert "secret" not in told
    assert not server.asked


def test_items_that_cannot_be_fetched_are_named_with_row_and_host(server: MediaServer) -> None:
    rows({"prompt": "<image><image>", "images": [f"{server.url}/a.png", f"{server.url}/no.png?key=secret"]})
    with pytest.raises(DataError) as caught:
        loaded(f'media_hosts=["{server.host}"]')
    problem = f'"images"[1] is a URL of {server.host}, which can\'t be fetched: HTTP 404'
    assert caught.value.message.endswith(f"rows.jsonl line 1: {problem}")


def test_prompts_with_one_address_are_repeats_without_being_fetched_for_it(server: MediaServer) -> None:
    same = {"prompt": "<image>?", "images": [f"{server.url}/a.png"]}
    rows(same, same, {"prompt": "<image>?", "images": [f"{server.url}/b.png"]})
    data = loaded(f'media_hosts=["{server.host}"]', "deduplicate=true")
    assert data.train.prompts == 2
    assert server.asked == {"a.png": 1, "b.png": 1}  # for their sizes


def test_a_wrong_prompt_is_told_without_waiting_for_those_behind_it(server: MediaServer) -> None:
    Path("a.png").write_bytes(PNG)
    server.files["late"] = PNG
    behind = [{"prompt": "<image>?", "images": [f"{server.url}/late"]}] * 100
    rows({"prompt": "<image> <|image_pad|>?", "images": ["a.png"]}, *behind)
    with pytest.raises(DataError) as caught:  # keeps the frames of the call
        loaded(f'media_hosts=["{server.host}"]')
    server.released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("measuring"):
            thread.join(30)
    assert server.asked["late"] <= MEASURING_THREADS
    assert "line 1 has 2 image tokens" in str(caught.value)


def test_media_that_a_taker_waits_for_are_not_dropped_for_another(
    server: MediaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_vision, "THREADS", 1)
    monkeypatch.setattr(data_vision, "KEPT", 1)
    server.files["late"] = PNG
    vision = replace(read_vision(Path("model")), hosts=(server.host,))
    items = [MediaItem("image", f"{server.url}/{name}", name) for name in ("late", "a.png", "b.png")]
    examples = [Example("<image>", media=(item,)) for item in items]
    ahead = MediaAhead(vision)
    ahead.expect([(0, examples[0])])
    with ThreadPoolExecutor(2) as takers:
        taken = []
        for index in (1, 2):
            taken.append(takers.submit(ahead.take, index, examples[index]))
            wait_until(lambda: len(ahead._awaited) == len(taken), "all takers wait")
        server.released.set()
        found = [one.result(30)[0].sha256 for one in taken]
    assert found == [normalise_image(one, vision.rule).sha256 for one in (PNG, OTHER)]


def test_items_that_could_not_be_fetched_ahead_are_fetched_again_when_their_turn_comes(
    server: MediaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "BACKOFF", Backoff(0.01))
    vision = replace(read_vision(Path("model")), hosts=(server.host,))
    example = Example("<image>", media=(MediaItem("image", f"{server.url}/a.png", "images[0]"),))
    server.statuses = {"a.png": [503] * 2 * fetching.ATTEMPTS}
    ahead = MediaAhead(vision)
    ahead.expect([(0, example)])
    wait_until(lambda: ahead._found[0].done(), "the failure")
    with pytest.raises(PromptHostAway):
        ahead.take(0, example)
    assert ahead.take(0, example)[0].sha256 == normalise_image(PNG, vision.rule).sha256
    assert server.asked == {"a.png": 2 * fetching.ATTEMPTS + 1}


def test_media_that_are_not_there_in_time_are_named_with_row_and_hosts(
    server: MediaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["late"] = PNG
    frames = [f"http://me:secret@localhost:{server.server_port}/a.png?key=secret", f"{server.url}/late?key=secret"]
    rows({"prompt": "<video>?", "videos": [frames]})
    server.released.set()
    train = loaded(f'media_hosts=["{server.host}", "localhost:{server.server_port}"]').train
    server.released.clear()
    monkeypatch.setattr(data_vision, "DEADLINE_SECONDS", 0.1)
    with pytest.raises(PromptHostAway) as caught:
        train.prompt(0)
    server.released.set()
    assert caught.value.message == "rows.jsonl line 1: its media from 127.0.0.1, localhost weren't read in 0.1 s"
