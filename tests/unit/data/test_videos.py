"""Prompts with video: their tokens and positions against transformers, and what runs show, publish and refuse."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.config.load_toml import ConfigError, load_file
from relaxd.data.dataset import load_data
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import normalise, read_vision
from relaxd.media.media_tokens import lay_out
from relaxd.media.placeholders import MediaItem
from relaxd.models import DataError
from tests.kit.vision import TOKENS, WITH_VIDEO, clip, encoded, encoded_clip, picture, write_vision_model

RUN = """
run.steps = 1
model.path = "model"
reward.name = "dummy"
[data]
source = "files"
path = "rows.jsonl"
max_prompt_tokens = 200
media_keys = { image = "images", video = "videos" }
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_vision_model(Path("model"))
    Path("a.png").write_bytes(encoded(picture(96, 64)))
    Path("b.mp4").write_bytes(encoded_clip(clip(8, 96, 64), 4, "mp4", "mpeg4", "yuv420p"))
    write_rows({"prompt": "<image>or <video>?", "images": "a.png", "videos": ["b.mp4"]})
    Path("run.toml").write_text(RUN)


def write_rows(*rows: Any) -> None:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def theirs() -> tuple[Any, Any]:
    """A processor whose parts need no torchvision, and a model without weights."""
    processor = object.__new__(transformers.Qwen3VLProcessor)
    processor.tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    processor.image_processor = SimpleNamespace(merge_size=2)
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tower = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 8}
    ids = {name: processor.tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    with torch.device("meta"):
        config = transformers.Qwen3VLConfig(
            text_config=text | {"vocab_size": 300}, vision_config=tower | {"deepstack_visual_indexes": [0]}, **ids
        )
        return processor, Qwen3VLModel(config)


@pytest.mark.parametrize("seed", range(12))
def test_ids_and_positions_are_those_of_transformers(seed: int) -> None:
    """Of a random prompt with texts, images and videos of different lengths, sizes and frame rates."""
    random = np.random.default_rng(seed)
    sample = Qwen3VLVideoProcessor.sample_frames
    limits = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    kinds = [*random.choice(["text", "image", "video"], random.integers(1, 5)), "video"]
    parts, items, metadata = [], [], []
    for kind in map(str, kinds):
        width, height = (int(side) for side in random.integers(24, 200, 2))
        source = encoded(picture(width, height, seed))
        if kind == "video":
            frames, rate = int(random.integers(2, 40)), float(random.choice([1, 4, 7.5, 30]))
            source = encoded_clip(clip(frames, width // 2 * 2, height // 2 * 2, seed), rate, "mp4", "mpeg4", "yuv420p")
            known = VideoMetadata(total_num_frames=frames, fps=rate)
            known.frames_indices = sample(limits, known, fps=2)  # type: ignore[arg-type]
            metadata.append(known)
        if kind == "text":
            parts.append({"type": "text", "text": f"What about {random.integers(1000)}?"})
        else:
            parts.append({"type": kind})
            items.append(MediaItem(kind, source, f"item {len(items)}"))
    example = Example([{"role": "user", "content": parts}], media=tuple(items))
    vision = read_vision(Path("model"), WITH_VIDEO)
    tokenizer = PromptTokenizer(Path("model"), vision=vision)
    media = normalise(example, vision)
    ours = tokenizer.encode_seen(example, media)
    np.testing.assert_array_equal(tokenizer.encode([example])[0], ours)
    grids = [one.size.grid for one in media]
    found = lay_out(ours, grids, vision.tokens)

    processor, model = theirs()
    by_kind = {kind: [one.size.grid for one in media if one.kind == kind] for kind in ("image", "video")}
    seen = {f"{kind}_grid_thw": torch.tensor(own) for kind, own in by_kind.items() if own}
    images = [processor.replace_image_token(seen, number) for number in range(len(by_kind["image"]))]
    clips = [processor.replace_video_token(seen | {"video_metadata": metadata}, n) for n in range(len(metadata))]
    processor._all_special_multimodal_tokens = list(TOKENS.values())
    ((text,), _) = transformers.Qwen3VLProcessor.get_text_with_replacements(
        processor, [tokenizer.render(example)], images, clips
    )
    ids = torch.tensor([processor.tokenizer(text)["input_ids"]])
    modality = (ids == vision.tokens.token).long() + 2 * (ids == vision.tokens.video).long()
    positions, delta = model.get_rope_index(ids, mm_token_type_ids=modality, **seen)
    np.testing.assert_array_equal(ours, ids[0])
    np.testing.assert_array_equal(found.modality, modality[0])
    np.testing.assert_array_equal(found.positions, positions[:, 0])
    assert found.next_position == ids.shape[1] + int(delta)


def test_videos_of_prompts_are_shown_with_times_and_tokens() -> None:
    done = CliRunner().invoke(app, ["data", "run.toml"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "with media 1, 1 images, 1 videos" in lines
    assert any(line.startswith('"images"[0] 96 x 64 96 x 64 6 ') for line in lines), lines
    assert any(line.startswith('"videos"[0] 96 x 64 96 x 64 2: 0.2 to 1.5 s 12 ') for line in lines), lines


def test_runs_publish_what_they_have_normalised() -> None:
    data = load_data(load_file(Path("run.toml"), ["--data.shuffle=false"]))
    prompt = data.train.prompt(0)
    vision = read_vision(Path("model"))
    assert [(record["kind"], record["grid"]) for record in prompt.media.records] == [
        ("image", [1, 4, 6]),
        ("video", [2, 4, 6]),
    ]
    assert [int((prompt.tokens == token).sum()) for token in (vision.tokens.token, vision.tokens.video)] == [6, 12]
    parts = prompt.to_json()["messages"][0]["content"]
    assert [(part["type"], part.get("media_type")) for part in parts] == [
        ("image", "image/png"),
        ("text", None),
        ("video", "image/png; frames=4"),
        ("text", None),
    ]
    assert prompt.text == "<image>or <video>?"


def test_settings_sample_and_shrink() -> None:
    def grid(*settings: str) -> list[int]:
        config = load_file(Path("run.toml"), [*settings])
        found: list[int] = load_data(config).train.prompt(0).media.records[1]["grid"]
        return found

    assert grid("--data.video_fps=4") == [4, 4, 6]
    assert grid("--data.video_fps=4", "--data.max_video_frames=6") == [3, 4, 6]
    assert grid("--data.max_video_frames=2") == [1, 4, 6]
    assert grid("--data.max_video_tokens=4") == [2, 2, 2]


def test_items_have_every_form() -> None:
    content = Path("b.mp4").read_bytes()
    text = base64.b64encode(content).decode()
    frames = [encoded(one) for one in clip(4, 96, 64)]
    inline = [base64.b64encode(one).decode() for one in frames]
    items = [
        "b.mp4",
        Path("b.mp4").absolute().as_uri(),
        text,
        f"data:video/mp4;base64,{text}",
        {"path": "b.mp4"},
        inline,
    ]
    write_rows(*({"prompt": "<video>?", "videos": [item]} for item in items))
    train = load_data(load_file(Path("run.toml"), ["--data.shuffle=false"])).train
    found = [train.prompt(index).media.records[0]["sha256"] for index in range(len(items))]
    assert len(set(found[:5])) == 1
    assert found[5] != found[0]
    again = load_data(load_file(Path("run.toml"), ["--data.deduplicate=true"]))
    assert (again.train.prompts, again.repeated) == (2, 4)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"prompt": "<video><video>", "videos": ["b.mp4"]},
            '"prompt" has more placeholders of type video than "videos"',
        ),
        (
            {"prompt": "<video>", "videos": ["b.mp4", "b.mp4"]},
            '"videos" has 2 items, but the prompt has 1 placeholders',
        ),
        ({"prompt": "<video>", "videos": ["a.png"]}, '"videos"[0] is no video in a format that is read'),
        ({"prompt": "<video>", "videos": [[]]}, '"videos"[0] is an empty list'),
        ({"prompt": "<image>", "images": ["b.mp4"]}, '"images"[0] is no image in a format'),
        ({"prompt": "<video><|video_pad|>", "videos": ["b.mp4"]}, "has 2 video tokens (id 261) for 1 videos after"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "b.mp4", "fps": 1}]}]},
            "which parts of type video don't",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "a"}]}]},
            "has media of type audio, but data.media_keys doesn't say so",
        ),
    ],
)
def test_wrong_videos_are_named_with_their_row(row: Any, complaint: str) -> None:
    write_rows(row)
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["data", "run.toml"], catch_exceptions=False)
    assert "rows.jsonl line 1" in str(caught.value)
    assert complaint in str(caught.value)


def test_long_videos_are_prompts_that_are_too_long() -> None:
    frames = encoded_clip(clip(8, 96, 64), 0.25, "mp4", "mpeg4", "yuv420p")
    Path("b.mp4").write_bytes(frames)
    with pytest.raises(DataError, match=r"rows.jsonl line 1 has \d+ tokens, more than data.max_prompt_tokens = 90"):
        load_data(load_file(Path("run.toml"), ["--data.max_prompt_tokens=90"]))


def test_videos_that_the_settings_do_not_name_are_refused() -> None:
    write_rows({"prompt": [{"role": "user", "content": [{"type": "video", "video": "b.mp4"}]}]})
    for keys in ("{}", '{image = "images"}'):
        with pytest.raises(
            DataError, match=r"line 1 has media of type video, but data.media_keys doesn't say so: set .*video = "
        ):
            load_data(load_file(Path("run.toml"), [f"--data.media_keys={keys}"]))


@pytest.mark.parametrize(
    ("file", "changes", "complaint"),
    [
        ("config.json", {"model_type": "qwen2_5_vl"}, "a model of type 'qwen2_5_vl': qwen3_vl, "),
        ("config.json", {"video_token_id": None}, "is damaged|lacks the ids"),
        ("video_preprocessor_config.json", {"patch_size": 14}, "has patch_size 14, but images have 16"),
        ("video_preprocessor_config.json", {"image_mean": [0, 0, 0]}, r"has image_mean \[0, 0, 0\], but images have"),
        ("video_preprocessor_config.json", {"size": {"shortest_edge": 9}}, "is damaged: no usable 'longest_edge'"),
        ("video_preprocessor_config.json", {"fps": -1}, "is damaged"),
    ],
)
def test_models_without_usable_rules_are_refused(file: str, changes: Any, complaint: str) -> None:
    path = Path("model") / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DataError, match=complaint) as caught:
        read_vision(Path("model"), WITH_VIDEO)
    assert caught.value.field == "model.path"


def test_rules_for_video_are_read_from_both_files() -> None:
    usual = read_vision(Path("model"), WITH_VIDEO)
    assert usual.video is not None
    assert (usual.video.fps, usual.video.min_frames, usual.video.max_frames) == (2, 4, 768)
    settings = json.loads(Path("model/video_preprocessor_config.json").read_text())
    Path("model/video_preprocessor_config.json").unlink()
    with pytest.raises(DataError, match="has no settings of its video processor: video_preprocessor_config"):
        read_vision(Path("model"), WITH_VIDEO)
    Path("model/processor_config.json").write_text(json.dumps({"video_processor": settings | {"fps": 4}}))
    other = read_vision(Path("model"), WITH_VIDEO)
    assert other.video is not None
    assert other.video.fps == 4
