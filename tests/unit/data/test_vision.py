"""Prompts with images: what `relaxd data` shows of them, and that runs refuse them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.cli.preparing.config_command import check
from relaxd.config.load_toml import ConfigError, load_file
from relaxd.data.dataset import load_data
from relaxd.data.vision import read_vision
from relaxd.models import DataError
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
    assert "with images 1, 2 images (runs refuse them so far: docs/media.md)" in lines
    assert any(line.startswith('"images"[0] 100 x 60 96 x 64 6 ') for line in lines), lines
    assert any(line.startswith('"images"[1] 640 x 480 288 x 192 54 ') for line in lines), lines
    assert "87 tokens with images" in lines
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


def test_runs_and_config_check_refuse_images() -> None:
    config = load_file(Path("run.toml"), [])
    complaint = "rows.jsonl line 1 has images: images can be prepared and looked at (relaxd data), but no engine"
    with pytest.raises(DataError) as caught:
        load_data(config)
    assert complaint in str(caught.value)
    assert any(complaint in problem.message for problem in check(config, call_reward=False))
    write_rows({"prompt": "Hi"}, {"prompt": "Ho", "images": []})
    assert load_data(config).train.prompts == 2


@pytest.mark.parametrize("keys", ['{ video = "videos" }', '{ image = "" }', '{ picture = "images" }'])
def test_other_kinds_of_media_are_refused(keys: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.media_keys"):
        load_file(Path("run.toml"), [f"--data.media_keys={keys}"])


def test_rules_are_read_from_every_form_of_the_settings() -> None:
    folder = Path("model")
    usual = read_vision(folder)
    assert usual.rule.max_pixels == 64 * 1024
    assert read_vision(folder, 2, 8).rule.max_pixels == 8 * 1024
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


def test_limits_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(DataError, match=r"data.max_image_tokens: is 2 and data.min_image_tokens 4"):
        read_vision(Path("model"), 0, 2)
    (Path("model") / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match=r"preprocessor_config.json is missing"):
        read_vision(Path("model"))
