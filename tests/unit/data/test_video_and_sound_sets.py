"""Data sets with video and sound in the forms of verl, Relax and the hub, read in place from JSON lines and Parquet."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from relaxd.config.load_toml import load_file
from relaxd.data.dataset import PromptDataset, load_data
from relaxd.data.vision import read_vision
from relaxd.media.images import normalise_image
from relaxd.media.prompt_media import PromptMedia
from relaxd.media.sounds import encode_wav, normalise_sound
from relaxd.media.videos import normalise_video
from relaxd.models import DataError
from tests.kit.cases import each
from tests.kit.sounds import sound, write_omni_model
from tests.kit.vision import clip, encoded, encoded_clip

RUN = """
run.steps = 1
model.path = "model"
reward.name = "dummy"
rollout.engine = "transformers"
[data]
source = "files"
max_prompt_tokens = 500
max_video_tokens = 40
prompt_key = "input"
answer_key = "label"
media_keys = { image = "images", video = "videos", audio = "audios" }
"""
FRAMES = [encoded(frame) for frame in clip(4, 96, 64)]
MP4 = encoded_clip(clip(8, 96, 64), 4, "mp4", "mpeg4", "yuv420p")
SAMPLES = sound(0.7)
WAV = encode_wav(SAMPLES, 16_000)
ARRAY = {"array": (SAMPLES[:8000] / 32768).tolist(), "sampling_rate": 16_000}


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


ITEMS: dict[str, tuple[str, Any, Any]] = {
    "verl, video": ("video", {"type": "video", "video": "a.mp4"}, MP4),
    "verl, file URI": ("video", {"video": "file://{here}/a.mp4"}, MP4),
    "verl, frames": ("video", {"type": "video", "video": ["0.png", "file://{here}/1.png", "2.png", "3.png"]}, FRAMES),
    "verl, path": ("video", "a.mp4", MP4),
    "verl, sound": ("audio", {"audio": "a.wav"}, WAV),
    "verl, sound's URL": ("audio", {"type": "audio", "audio_url": "data:audio/wav;base64," + text_of(WAV)}, WAV),
    "verl, image": ("image", {"image": "0.png"}, FRAMES[0]),
    "verl, image's URL": ("image", {"image_url": "file://{here}/0.png"}, FRAMES[0]),
    "Relax, data URI": ("video", "data:video/mp4;base64," + text_of(MP4), MP4),
    "Relax, base64": ("video", {"base64": text_of(MP4), "path": None}, MP4),
    "Relax, frames as base64": ("video", [text_of(frame) for frame in FRAMES], FRAMES),
    "Relax, path": ("audio", {"path": "a.wav"}, WAV),
    "Relax, sound": ("audio", {"base64": text_of(WAV)}, WAV),
    "hub, samples": ("audio", ARRAY | {"path": "nowhere.wav"}, ARRAY),
}
"""Kind, an item in a form that JSON has, and what it is."""
BYTES: dict[str, tuple[str, Any, Any]] = {
    "verl, bytes": ("image", {"bytes": FRAMES[0], "path": None}, FRAMES[0]),
    "Relax, bytes": ("video", MP4, MP4),
    "Relax, frames": ("video", FRAMES, FRAMES),
    "hub, video": ("video", {"bytes": MP4, "path": "a.mp4"}, MP4),
    "hub, sound": ("audio", {"bytes": WAV, "path": "a.wav"}, WAV),
}
"""The same in forms that only tables have."""
PLACES = [
    (name, alone)
    for name, (_, item, _) in (ITEMS | BYTES).items()
    for alone in (False, True)
    if not (alone and isinstance(item, list))
]
"""Forms and whether the column has the item alone: one with a video that is a list of frames has a list with it."""
NORMALISE = {"image": normalise_image, "video": normalise_video, "audio": normalise_sound}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_omni_model(Path("model"))
    Path("a.mp4").write_bytes(MP4)
    Path("a.wav").write_bytes(WAV)
    for number, frame in enumerate(FRAMES):
        Path(f"{number}.png").write_bytes(frame)


def row_of(kind: str, item: Any, *, alone: bool) -> dict[str, Any]:
    item = json.loads(json.dumps(item).replace("{here}", str(Path.cwd()))) if "{here}" in str(item) else item
    text = f"<{kind}>\nWhat is it?"
    other: Any = item if alone else [item]
    return {"input": text if alone else [{"role": "user", "content": text}], "label": "B", f"{kind}s": other}


def check(train: PromptDataset, index: int, name: str) -> None:
    kind, _, content = (ITEMS | BYTES)[name]
    vision = read_vision(Path("model"), load_file(Path("run.toml"), ["--data.path=any"]).data)
    prompt = train.prompt(index)
    assert prompt.media == PromptMedia.of([NORMALISE[kind](content, vision.rules[kind])]), name
    assert (prompt.answer, prompt.text) == ("B", f"<{kind}>\nWhat is it?")


def loaded(file: str) -> PromptDataset:
    Path("run.toml").write_text(RUN)
    return load_data(load_file(Path("run.toml"), [f"--data.path={file}"])).train


def test_sets_of_json_lines_with_video_and_sound_are_read_in_place() -> None:
    rows = [row_of(*ITEMS[name][:2], alone=alone) for name, alone in PLACES if name in ITEMS]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = loaded("rows.jsonl")
    for index, (name, _) in enumerate(PLACES[: len(rows)]):
        check(train, index, name)


@each(("name", "alone"), PLACES)
def test_tables_with_video_and_sound_are_read_in_place(name: str, alone: bool) -> None:
    kind, item, _ = (ITEMS | BYTES)[name]
    pa.parquet.write_table(pa.Table.from_pylist([row_of(kind, item, alone=alone)]), "rows.parquet")
    check(loaded("rows.parquet"), 0, name)


def test_rows_of_one_table_have_all_kinds_in_the_order_of_their_places() -> None:
    seen = {"videos": [{"video": "a.mp4"}], "audios": ["a.wav"], "images": ["0.png"]}
    rows = [
        {"input": "<audio><video> and <image>", **seen},
        {"input": "Nothing to see", "videos": [], "audios": None, "images": []},
        {"input": "<video><video>", "videos": [{"video": "a.mp4", "type": "video"}, {"video": "a.mp4"}]},
    ]
    pa.parquet.write_table(pa.Table.from_pylist([row | {"label": "B"} for row in rows]), "rows.parquet")
    train = loaded("rows.parquet")
    kinds = [[record["kind"] for record in train.prompt(index).media.records] for index in range(3)]
    assert kinds == [["audio", "video", "image"], [], ["video", "video"]]


@pytest.mark.parametrize(
    ("kind", "item", "complaint"),
    [
        (
            "video",
            {"type": "video", "video": "a.mp4", "fps": 2, "max_frames": 8},
            "\"videos\"[0] has 'fps', 'max_frames', which parts of type video don't have: leave it out (data",
        ),
        (
            "video",
            {"type": "image", "image": "0.png"},
            '"videos"[0] is of type image, but its column has items of type v',
        ),
        ("audio", {"audio": {"nothing": 1}}, '"audios"[0] is an object without bytes, base64 and path'),
        ("audio", "a.tar:b.wav:512:100", "\"audios\"[0] is 'a.tar:b.wav:512:100', which is no file here"),
        ("video", {"base64": "?"}, '"videos"[0] is an object whose "base64" is damaged'),
    ],
)
def test_items_in_other_forms_are_refused_by_name(kind: str, item: Any, complaint: str) -> None:
    Path("rows.jsonl").write_text(json.dumps(row_of(kind, item, alone=False)))
    with pytest.raises(DataError) as caught:
        loaded("rows.jsonl").prompt(0)
    assert f"rows.jsonl line 1: {complaint}" in str(caught.value)
