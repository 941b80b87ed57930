"""Prompts with images: `relaxd data`, what runs publish of them, and what they refuse."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relaxd.board import stages_for
from relaxd.cli.main import app
from relaxd.config import DataConfig
from relaxd.config.load_toml import ConfigError, load_file
from relaxd.data import vision as data_vision
from relaxd.data.dataset import NAMED_PROMPTS, Cursor, MediaChanges, load_data
from relaxd.data.examples import Example
from relaxd.data.vision import VisionModel, normalise, read_vision
from relaxd.engines import MODEL_KINDS
from relaxd.media.images import NormalImage, normalise_image
from relaxd.media.placeholders import MediaItem
from relaxd.media.prompt_media import PromptMedia
from relaxd.models import DataError
from relaxd.models.shape import SEEING
from tests.kit.vision import PROCESSOR, encoded, picture, write_vision_model

RUN = """
run.steps = 1
model.path = "model"
reward.name = "dummy"
[data]
source = "files"
path = "rows.jsonl"
max_prompt_tokens = 100
media_keys = { image = "images" }
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_vision_model(Path("model"))
    Path("a.png").write_bytes(encoded(picture(100, 60)))
    Path("b.jpg").write_bytes(encoded(picture(640, 480), "JPEG"))
    write_rows({"prompt": "<image>or <image>?", "images": ["a.png", "b.jpg"], "level": 1}, {"prompt": "Hi"})
    Path("run.toml").write_text(RUN)


def write_rows(*rows: Any) -> None:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def shown(*words: str) -> list[str]:
    done = CliRunner().invoke(app, ["data", "run.toml", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [" ".join(line.split()) for line in done.output.splitlines()]


def test_images_of_prompts_are_shown_with_sizes_and_tokens() -> None:
    lines = shown()
    assert "tokens shortest 21, median 54, 95 % 84, longest 87" in lines  # 19 + 4 of text, 4 marks, 6 + 54
    assert "with media 1, 2 images" in lines
    assert any(line.startswith('"images"[0] 100 x 60 96 x 64 6 ') for line in lines), lines
    assert any(line.startswith('"images"[1] 640 x 480 288 x 192 54 ') for line in lines), lines
    assert "87 tokens with media" in lines
    assert "metadata.level 1 a number, 1 missing" in lines
    assert not any(line.startswith("metadata.images") for line in lines)
    assert any(line.startswith('"images"[1] 640 x 480 64 x 32 2 ') for line in shown("--data.max_image_tokens=4"))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"images": ["a.png"]},
            'rows.jsonl line 1: "prompt" has more placeholders of type image than "images" has items (1',
        ),
        ({"images": ["a.png", "no.png"]}, "rows.jsonl line 1: \"images\"[1] is 'no.png', which is no file here"),
        ({"images": ["a.png", "model/config.json"]}, 'rows.jsonl line 1: "images"[1] is no image in a format'),
        (
            {"prompt": "<image><image> <|image_pad|>", "images": ["a.png", "b.jpg"]},
            "rows.jsonl line 1 has 3 image tokens (id 260) for 2 images after templating",
        ),
    ],
)
def test_wrong_images_are_named_with_their_row(row: Any, complaint: str) -> None:
    write_rows({"prompt": "<image>or <image>?"} | row)
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["data", "run.toml"], catch_exceptions=False)
    assert complaint in str(caught.value)


def test_pixels_are_looked_at_only_of_prompts_that_are_shown() -> None:
    Path("b.jpg").write_bytes(Path("b.jpg").read_bytes()[:-500])
    shown("--prompts", "0")
    with pytest.raises(ConfigError, match=r'rows.jsonl line 1: "images"\[1\] is a broken image'):
        CliRunner().invoke(app, ["data", "run.toml"], catch_exceptions=False)


def test_prompts_of_runs_have_the_tokens_of_their_images_and_name_them_by_hash() -> None:
    config = load_file(Path("run.toml"), ["--data.shuffle=false"])
    data = load_data(config)
    vision = read_vision(Path("model"))
    images = [normalise_image(name, vision.rule) for name in ("a.png", "b.jpg")]
    seen, text = data.train.prompt(0), data.train.prompt(1)
    assert len(seen.tokens) == 87
    assert (seen.tokens == vision.tokens.token).sum() == 6 + 54
    assert seen.media == PromptMedia.of(images)
    assert seen.text == "<image>or <image>?"
    parts = seen.to_json()["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image", "text"]
    assert [part["sha256"] for part in parts if part["type"] == "image"] == [one.sha256 for one in images]
    assert not text.media
    assert {"prompt_media", "media_contents"} <= set(stages_for(config)[0].needs) & set(stages_for(config)[-1].needs)
    assert not {"prompt_media"} & set(stages_for(config)[1].needs)


def test_images_are_normalised_ahead_and_again_after_a_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    normalised: list[str] = []

    def counted(example: Example, vision: VisionModel) -> list[NormalImage]:
        normalised.append(example.place)
        return normalise(example, vision)

    monkeypatch.setattr(data_vision, "normalise", counted)
    train = load_data(load_file(Path("run.toml"), ["--data.shuffle=false"])).train
    train.look_ahead(Cursor(), 100)
    train.prompt(0)
    train.prompt(0)
    assert normalised == ["rows.jsonl line 1"]
    whole = Path("b.jpg").read_bytes()
    Path("b.jpg").write_bytes(whole[:-500])
    other = load_data(load_file(Path("run.toml"), ["--data.shuffle=false"])).train
    with pytest.raises(DataError, match="is a broken image"):
        other.prompt(0)
    Path("b.jpg").write_bytes(whole)
    assert other.prompt(0).media == train.prompt(0).media


def test_prompts_are_equal_if_text_and_contents_of_images_are() -> None:
    Path("copy.png").write_bytes(Path("a.png").read_bytes())
    inline = base64.b64encode(Path("a.png").read_bytes()).decode()
    items = ("a.png", "copy.png", inline, "b.jpg", "A.png")  # the last one is another picture
    Path("A.png").write_bytes(encoded(picture(100, 60, 1)))
    write_rows(*({"prompt": "What is <image>?", "images": [item]} for item in items))
    data = load_data(load_file(Path("run.toml"), ["--data.deduplicate=true"]))
    assert (data.train.prompts, data.repeated) == (3, 2)
    assert "repeated 2 unchanged, 2 with other case or white space" in shown("--prompts", "0")


def test_the_digest_of_data_changes_with_an_image_file() -> None:
    config = load_file(Path("run.toml"), [])
    before = load_data(config).train.digest
    Path("a.png").write_bytes(encoded(picture(100, 60), compress_level=0))
    assert load_data(config).train.digest != before


def test_a_file_that_changes_between_visits_is_another_image_and_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a later epoch and after a restart, also if it has the same size, which the digest doesn't tell."""
    Path("a.bmp").write_bytes(encoded(picture(100, 60), "BMP"))
    write_rows({"prompt": "Hi"}, {"prompt": "<image>and <image>?", "images": ["b.jpg", "a.bmp"]})

    def visited() -> tuple[str, list[str]]:
        train = load_data(load_file(Path("run.toml"), ["--data.shuffle=false"])).train
        train.keep(tmp_path)
        train.prompt(0)
        return train.digest, list(train.prompt(1).media.by_hash())

    digest, before = visited()
    assert visited() == (digest, before)
    assert not caplog.records
    Path("a.bmp").write_bytes(encoded(picture(100, 60, 1), "BMP"))
    same, after = visited()
    assert same == digest
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]
    assert [one.getMessage().split(" aren't")[0] for one in caplog.records] == [
        'rows.jsonl line 2: its media ("images"[0], "images"[1])'
    ]
    visited()
    assert len(caplog.records) == 1
    # Other data, as after `relaxd resume RUN --new-data`, are compared with nothing.
    write_rows({"prompt": "Hi"}, {"prompt": "<image>?", "images": ["b.jpg"]})
    visited()
    assert len(caplog.records) == 1


def test_changed_media_are_found_without_a_file_of_hashes_and_few_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    example = Example("?", media=tuple(MediaItem("image", "a.png", f'"images"[{place}]') for place in range(6)))
    images = [normalise_image(name, read_vision(Path("model")).rule) for name in ("a.png", "b.jpg")]
    changes = MediaChanges(30, "00" * 16, tmp_path / "missing" / "media.bin")
    assert "media.bin can't be used, so media that change while" in caplog.messages.pop()
    caplog.clear()
    for one in images:
        for index in range(30):
            changes.look(index, example, [one] * 6)
    assert len(caplog.messages) == NAMED_PROMPTS
    assert '"images"[3], ...)' in caplog.messages[0]
    assert ["aren't named" in said for said in caplog.messages] == [False] * (NAMED_PROMPTS - 1) + [True]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            ['--rollout.engine="sglang_external"'],
            'rollout.engine = "sglang_external", which takes no image (data.media_keys): "transformers" or "sglang" d',
        ),
        (["--data.max_prompt_tokens=80"], "rows.jsonl line 1 has 87 tokens, more than data.max_prompt_tokens = 80"),
        (["--data.media_keys={}"], "rows.jsonl line 1 has media of type image, but data.media_keys"),
    ],
)
def test_runs_with_images_that_cannot_be_seen_are_refused(settings: list[str], complaint: str) -> None:
    if "--data.media_keys={}" in settings:
        write_rows({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]})
    with pytest.raises(DataError) as caught:
        load_data(load_file(Path("run.toml"), settings))
    assert complaint in str(caught.value)


@pytest.mark.parametrize("keys", ['{ image = "" }', '{ picture = "images" }'])
def test_other_kinds_of_media_are_refused(keys: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.media_keys"):
        load_file(Path("run.toml"), [f"--data.media_keys={keys}"])


def limits(least: int, most: int) -> DataConfig:
    return DataConfig(source="addition", min_image_tokens=least, max_image_tokens=most)


def test_rules_are_read_from_every_form_of_the_settings() -> None:
    folder = Path("model")
    usual = read_vision(folder)
    assert usual.rule.max_pixels == 64 * 1024
    assert read_vision(folder, limits(2, 8)).rule.max_pixels == 8 * 1024
    file = folder / "preprocessor_config.json"
    old = {name: value for name, value in PROCESSOR.items() if name != "size"}
    file.write_text(json.dumps(old | {"min_pixels": 4096, "max_pixels": 65536}))
    assert read_vision(folder) == usual
    file.unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    assert read_vision(folder) == usual


@pytest.mark.parametrize(
    ("file", "changes", "complaint"),
    [
        ("config.json", {"model_type": "qwen3"}, "has a model of type 'qwen3'"),
        ("config.json", {"vision_config": {"patch_size": 14}}, "has patches of 16 pixels, 2 x 2 of them a token, but"),
        ("config.json", {"image_token_id": None}, "is damaged"),
        ("preprocessor_config.json", {"size": {}}, "is damaged"),
        ("preprocessor_config.json", {"merge_size": 0}, "is damaged"),
        ("preprocessor_config.json", {"resample": 2}, "resizes otherwise than by bicubic"),
    ],
)
def test_models_without_usable_rules_are_refused(file: str, changes: Any, complaint: str) -> None:
    path = Path("model") / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DataError, match=complaint) as caught:
        read_vision(Path("model"))
    assert caught.value.field == "model.path"


def test_models_that_see_here_are_those_that_are_trained() -> None:
    assert set(MODEL_KINDS) == set(SEEING)
    with pytest.raises(DataError, match="'qwen3_vl', which takes no audio here: qwen3_omni_moe do"):
        read_vision(Path("model"), DataConfig(source="addition", media_keys={"audio": "sounds"}))


def test_limits_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(DataError, match=r"data.max_image_tokens is 2 and data.min_image_tokens 4"):
        read_vision(Path("model"), limits(0, 2))
    (Path("model") / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match=r"preprocessor_config.json is missing"):
        read_vision(Path("model"))
