"""A run on prompts with images and videos, from files to the gradient, on a tiny random model that sees."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from relaxd.cli.preparing.config_command import check
from relaxd.config.load_toml import load_file
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary, warnings_of
from tests.kit.media_server import media_server
from tests.kit.ports import free_port
from tests.kit.vision import clip, encoded, encoded_clip, make_vision_model, picture

SETTINGS = """
[data]
source = "files"
path = "rows.jsonl"
eval_path = "rows.jsonl"
media_keys = { image = "images", video = "videos" }
max_prompt_tokens = 200
"""


def write_run(folder: Path) -> Path:
    """Write a run whose prompts have no image, one or two, and some a video."""
    make_vision_model(folder / "seeing")
    rows = []
    for number in range(12):
        images = [f"{number}-{place}.png" for place in range(number % 3)]
        for place, name in enumerate(images):
            (folder / name).write_bytes(encoded(picture(64 + 32 * place, 64, number)))
        videos = [f"{number}.mp4"] if number % 2 else []
        for name in videos:
            frames = clip(6, 64, 96, number)
            (folder / name).write_bytes(encoded_clip(frames, 4, "mp4", "mpeg4", "yuv420p"))
        prompt = "What is here?" + "<image>" * len(images) + "<video>" * len(videos)
        rows.append({"prompt": prompt, "images": images, "videos": videos})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return write_settings(folder, SETTINGS)


def write_settings(folder: Path, settings: str) -> Path:
    """Write the settings of a run with other ones of its data and the model that sees."""
    usual = (folder / "tiny.toml").read_text()
    begin, end = usual.index("[data]"), usual.index("[reward]")
    text = usual[:begin] + settings + usual[end:]
    model = text.split('path = "')[1].split('"')[0]
    (folder / "images.toml").write_text(text.replace(model, str(folder / "seeing"), 1))
    return folder / "images.toml"


@pytest.mark.night
@pytest.mark.timeout(900)
def test_a_run_trains_on_images_and_videos(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_run(workplace.folder)
    monkeypatch.chdir(workplace.folder)
    assert check(load_file(file, []), call_reward=False) == []
    code, output = workplace.relaxd("run", str(file), "--run-id", "images", timeout=800)
    assert code == 0, output
    folder = workplace.folder / "runs" / "images"
    check_books(read_summary(folder), steps=3)
    assert warnings_of(folder) == []
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Engine and trainer have seen the same frames in the same places, or their log-probs would differ.
    gaps = [line["logprob_difference_max"] for line in steps if "logprob_difference_max" in line]
    assert gaps  # of a step whose samples are all of older weights there is none
    assert max(gaps) < 1e-4
    texts = [text.read_text() for text in folder.glob("*.jsonl")]
    assert all(any(mark in text for text in texts) for mark in ("<image>", "<video>"))


STEPS = 16
"""So many that prompts are left whose pictures aren't fetched when the host goes away after the first step."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_waits_for_the_host_of_its_images(workplace: Workplace) -> None:
    make_vision_model(workplace.folder / "seeing")
    port = free_port()
    files = {f"{number}.png": encoded(picture(64, 64, number)) for number in range(64)}
    rows = [{"prompt": "<image>What is here?", "images": [f"http://127.0.0.1:{port}/{name}"]} for name in files]
    (workplace.folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    hosts = f'media_hosts = ["127.0.0.1:{port}"]\n'
    settings = SETTINGS.replace(', video = "videos"', "").replace("[data]\n", f"[data]\n{hosts}")
    file = write_settings(workplace.folder, settings)
    with media_server(port, files):
        run = workplace.start("run", str(file), "--run-id", "remote", f"--run.steps={STEPS}", "--board.max_staleness=0")
        assert run.stdout is not None
        output = list(lines_until(run.stdout, r"step +1/"))
    output += lines_until(run.stdout, re.escape(f"it waits for a media host (127.0.0.1:{port}), for run remote: "))
    assert run.poll() is None
    with media_server(port, files):
        output += run.stdout
        assert run.wait(timeout=60) == 0, "".join(output)
    folder = workplace.folder / "runs" / "remote"
    check_books(read_summary(folder), steps=STEPS)
    assert [one for one in warnings_of(folder) if "a media host" not in one] == []


def lines_until(stream: IO[str], pattern: str) -> Iterator[str]:
    """Yield the lines of a stream up to the first that has a pattern."""
    for line in stream:
        yield line
        if re.search(pattern, line):
            return
    raise AssertionError(f"the stream has ended without {pattern!r}")
