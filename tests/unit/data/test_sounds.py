"""Prompts with sound: their tokens and positions against transformers, and what runs show, publish and refuse."""

import base64
import io
import json
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.video_processing_utils import BaseVideoProcessor
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.cli.preparing.config_command import check
from relaxd.config.load_toml import ConfigError, load_file
from relaxd.data.dataset import load_data
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import normalise, read_vision
from relaxd.media.media_tokens import lay_out, sound_tokens
from relaxd.media.placeholders import MediaItem
from relaxd.media.prompt_media import PromptMedia
from relaxd.media.shown import media_line, shown_media
from relaxd.media.sounds import SoundRule, encode_wav, normalise_sound
from relaxd.media.videos import BlockRule
from relaxd.models import DataError
from tests.kit.sounds import WITH_ALL, WITH_SOUND, encoded_sound, features_of, sound, write_omni_model
from tests.kit.vision import clip, encoded, encoded_clip, picture, write_vision_model

KINDS = ("image", "audio", "video")
RUN = """
run.steps = 1
model.path = "model"
reward.name = "dummy"
rollout.engine = "transformers"
[data]
source = "files"
path = "rows.jsonl"
max_prompt_tokens = 200
media_keys = { audio = "sounds" }
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_omni_model(Path("model"))
    Path("a.wav").write_bytes(encode_wav(sound(1.5), 16_000))
    Path("b.flac").write_bytes(encoded_sound(sound(0.7, 1), "flac", "flac", 44_100, "stereo"))
    write_rows({"prompt": "<audio>or <audio>?", "sounds": ["a.wav", "b.flac"]})
    Path("run.toml").write_text(RUN)


def write_rows(*rows: Any) -> None:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A processor without its parts, and a model without weights."""
    folder = write_omni_model(tmp_path_factory.mktemp("theirs"))
    processor = object.__new__(Qwen3OmniMoeProcessor)  # its constructor asks for a video processor
    processor.tokenizer = AutoTokenizer.from_pretrained(folder)
    processor.image_token, processor.audio_token, processor.video_token = (f"<|{kind}_pad|>" for kind in KINDS)
    processor.video_processor = SimpleNamespace(merge_size=2)
    processor.audio_bos_token, processor.audio_eos_token = "<|audio_start|>", "<|audio_end|>"
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder).thinker_config
        return processor, Qwen3OmniMoeThinkerForConditionalGeneration(config)


@pytest.mark.parametrize("own", [False, True], ids=["silent", "with sound"])
@pytest.mark.parametrize("seed", range(8))
def test_ids_and_positions_are_those_of_transformers(seed: int, own: bool, theirs: tuple[Any, Any]) -> None:
    """Of a random prompt with texts, images, videos and sounds of different lengths and sizes.

    Videos are silent or have sounds of their own.
    """
    random, (processor, model), fps = np.random.default_rng(seed), theirs, [0.5, 1.0, 2.0, 6.5][seed % 4]
    parts, items, sounds, owners = [], [], [], []
    kinds = ["text", "image", "video", "audio"]
    for kind in map(str, [*random.choice(kinds, random.integers(1, 5)), kinds[2 + seed % 2]]):
        if kind == "text":
            parts.append({"type": "text", "text": f"What about {random.integers(1000)}?"})
            continue
        parts.append({"type": kind})
        one = sound(float(random.uniform(0.03, 4)), seed)
        width, height = (int(side) for side in random.integers(24, 200, 2))
        if kind == "audio" or (own and kind == "video"):
            sounds.append(one)
            owners.append(kind)
        source: Any = encode_wav(one, 16_000) if kind == "audio" else encoded(picture(width, height, seed))
        if kind == "video":
            frames = clip(int(random.integers(2, 16)), width, height, seed)
            source = encoded_clip(frames, samples=one) if own else [encoded(frame) for frame in frames]
        items.append(MediaItem(kind, source, f"item {len(items)}"))
    example = Example([{"role": "user", "content": parts}], media=tuple(items))
    vision = read_vision(Path("model"), WITH_ALL.model_copy(update={"video_fps": fps, "video_sound": own}))
    tokenizer = PromptTokenizer(Path("model"), vision=vision)
    media = normalise(example, vision)
    ours = tokenizer.encode_seen(example, media)
    np.testing.assert_array_equal(tokenizer.encode([example])[0], ours)
    times = [one.size.times for one in media]
    found = lay_out(ours, [one.size.grid for one in media], vision.tokens, times=times)

    lengths = torch.tensor([features_of(one).shape[1] for one in sounds])
    heard_tokens = {"num_audio_tokens": [sound_tokens(int(length)) for length in lengths]}
    grids = torch.tensor([one.size.grid for one in media if one.kind == "image"]).reshape(-1, 3)
    images = ["<|image_pad|>" * int(grid.prod() // 4) for grid in grids]
    of_kind = {kind: [index for index, one in enumerate(owners) if one == kind] for kind in ("audio", "video")}
    heard = [processor.replace_audio_token(heard_tokens, index) for index in of_kind["audio"]]
    clips = torch.tensor([one.size.grid[:3] for one in media if one.kind == "video"]).reshape(-1, 3)
    seen = {"video_grid_thw": clips, "video_second_per_grid": [2 / fps] * len(clips)}
    usual = {"load_audio_from_video": own, "position_id_per_seconds": 13.0}
    shown = [
        processor.replace_video_token(seen, index, heard_tokens, of_kind["video"], **usual)
        for index in range(len(clips))
    ]
    text = tokenizer.render(example)
    for mark, replacements in (("<|image_pad|>", images), ("<|audio_pad|>", heard), ("<|video_pad|>", shown)):
        pieces = text.split(mark)
        text = pieces[0] + "".join(one + rest for one, rest in zip(replacements, pieces[1:], strict=True))
    ids = torch.tensor([processor.tokenizer(text)["input_ids"]])
    positions, delta = model.get_rope_index(
        ids,
        grids if len(grids) else None,
        clips if len(clips) else None,
        torch.ones_like(ids),
        own,
        lengths,
        torch.full((len(clips),), 2 / fps),
    )
    np.testing.assert_array_equal(ours, ids[0])
    modality = sum(kind * (ids == token).long() for token, kind in vision.tokens.modalities.items())
    np.testing.assert_array_equal(found.modality, modality[0])
    np.testing.assert_array_equal(found.positions, positions[:, 0])
    assert found.next_position == ids.shape[1] + int(delta.flatten()[0])


def test_sounds_of_prompts_are_shown_with_lengths_and_tokens() -> None:
    done = CliRunner().invoke(app, ["data", "run.toml"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "with media 1, 2 audios" in lines
    assert any(line.startswith('"sounds"[0] 16,000 Hz, 1 channel 24,000 samples 1.50 s 20 ') for line in lines), lines
    assert any(line.startswith('"sounds"[1] 44,100 Hz, 2 channels 11,2') for line in lines), lines


def test_runs_publish_what_they_have_normalised() -> None:
    prompt = load_data(load_file(Path("run.toml"), ["--data.shuffle=false"])).train.prompt(0)
    vision = read_vision(Path("model"))
    assert [(record["kind"], record["grid"]) for record in prompt.media.records] == [("audio", [150]), ("audio", [70])]
    assert int((prompt.tokens == vision.tokens.audio).sum()) == 20 + 9
    parts = prompt.to_json()["messages"][0]["content"]
    assert [(part["type"], part.get("media_type")) for part in parts] == [
        ("audio", "audio/wav"),
        ("text", None),
        ("audio", "audio/wav"),
        ("text", None),
    ]
    assert prompt.text == "<audio>or <audio>?"
    shown = shown_media(prompt.media.by_hash(), prompt.media.records, previews=True)
    assert [media_line(one)[-8:] for one in shown.values()] == [", 1.50 s", ", 0.70 s"]


@pytest.mark.parametrize(("rate", "kept_rate"), [(16_000, 8_000), (24_000, 8_000), (44_100, 7_350), (8_000, 8_000)])
def test_the_beginning_of_a_sound_is_kept_to_be_played(rate: int, kept_rate: int) -> None:
    seconds = np.arange(5 * rate) / rate
    tone = np.round(20_000 * np.sin(2 * np.pi * (440 + 220 * (seconds >= 2.5)) * seconds)).astype(np.int16)
    item = normalise_sound(encode_wav(tone, rate), SoundRule(10.0, rate=rate))
    media = PromptMedia.of([item])
    (shown,) = shown_media(media.by_hash(), media.records, previews=True).values()
    assert shown["seconds"] == 5.0
    with wave.open(io.BytesIO(base64.b64decode(shown["excerpt"].removeprefix("data:audio/wav;base64,")))) as file:
        assert file.getparams()[:4] == (1, 1, kept_rate, 3 * kept_rate)
        heard = np.frombuffer(file.readframes(file.getnframes()), np.uint8).astype(float) - 128
    assert len(shown["excerpt"]) < 32_200
    for part, frequency in ((heard[: 2 * kept_rate], 440), (heard[int(2.6 * kept_rate) :], 660)):
        spectrum = np.abs(np.fft.rfft(part))
        assert spectrum.argmax() * kept_rate / len(part) == pytest.approx(frequency, abs=3)
        assert np.abs(part).max() == pytest.approx(20_000 / 256, rel=0.05)
    assert "excerpt" not in shown_media(media.by_hash(), media.records, previews=False)[item.sha256]


def test_videos_are_published_with_their_own_sounds_if_the_run_asks_for_them() -> None:
    Path("a.mkv").write_bytes(encoded_clip(clip(4, 64, 64), 2.0, samples=sound(1.5)))
    write_rows({"prompt": "<video>?", "videos": ["a.mkv"]})
    keys = ['--data.media_keys={video = "videos"}', "--data.max_prompt_tokens=400"]
    found = [
        load_data(load_file(Path("run.toml"), [*keys, *more])).train.prompt(0).media.records[0]
        for more in ([], ["--data.video_sound=true"])
    ]
    assert [(record["grid"], record["times"]) for record in found] == [
        ([2, 24, 24], [0, 1]),
        ([2, 24, 24, 150], [0, 1]),
    ]
    done = CliRunner().invoke(app, ["data", "run.toml", *keys, "--data.video_sound=true"], catch_exceptions=False)
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert any(line.startswith('"videos"[0] 64 x 64 384 x 384 2: 0.0 to 1.0 s with 308 ') for line in lines), lines


def test_the_same_sound_in_other_forms_is_the_same_prompt() -> None:
    samples = (sound(1.5) / 32768).tolist()
    items = ["a.wav", {"array": samples, "sampling_rate": 16_000}, {"array": samples, "sampling_rate": 16_000}]
    write_rows(*({"prompt": "<audio>?", "sounds": [item]} for item in [*items, "b.flac"]))
    train = load_data(load_file(Path("run.toml"), ["--data.shuffle=false"])).train
    found = [train.prompt(index).media.records[0]["sha256"] for index in range(4)]
    assert len(set(found[:3])) == 1
    assert found[3] != found[0]
    again = load_data(load_file(Path("run.toml"), ["--data.deduplicate=true"]))
    assert again.repeated == 1  # by contents: a file and its samples aren't compared


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"prompt": "<audio><audio>", "sounds": ["a.wav"]},
            '"prompt" has more placeholders of type audio than "sounds" has items (1; rows',
        ),
        ({"prompt": "<audio>", "sounds": ["a.wav"] * 2}, '"sounds" has 2 items, but the prompt has 1 placeholders'),
        ({"prompt": "<audio><|audio_pad|>", "sounds": ["a.wav"]}, "has 2 sound tokens (id 260) for 1 sounds after"),
        ({"prompt": "<audio>", "sounds": ["rows.jsonl"]}, '"sounds"[0] is no sound in a format that is read'),
        (
            {"prompt": "<audio>", "sounds": [{"array": [0.0] * 900, "sampling_rate": "16 kHz"}]},
            '"sounds"[0] has "sampling_rate" \'16 kHz\': it must be a whole number',
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "b.mp4"}]}]},
            "has media of type video, but data.media_keys doesn't say so",
        ),
    ],
)
def test_wrong_sounds_are_named_with_their_row(row: Any, complaint: str) -> None:
    write_rows(row)
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["data", "run.toml"], catch_exceptions=False)
    assert "rows.jsonl line 1" in str(caught.value)
    assert complaint in str(caught.value)


def test_sounds_that_are_too_long_are_refused_and_not_cut() -> None:
    with pytest.raises(DataError, match=r'line 1: "sounds"\[0\] is longer than data.max_audio_seconds = 1: cut it'):
        load_data(load_file(Path("run.toml"), ["--data.max_audio_seconds=1"]))


@pytest.mark.parametrize(
    ("settings", "setting", "complaint"),
    [
        (
            ["--rollout.engine=sglang_external"],
            "rollout.engine",
            'which takes no audio (data.media_keys): "transformers" or "sglang" does',
        ),
        (
            ["--rollout.engine=sglang_external", "--data.media_keys={}"],
            "rollout.engine",
            "isn't known to run models of type 'qwen3_omni_moe' as the trainer does",
        ),
        (["--model.path=seeing"], "rollout.engine", "which takes no audio with a model of type 'qwen3_vl'"),
        (
            ['--data.media_keys={video = "sounds"}', "--data.video_fps=3"],
            "data.video_fps",
            "so by 8.66667 from one time to the next at 3 frames a second: take one that makes this a whole number, "
            "such as 0.5, 1, 2, 6.5, 13, 26",
        ),
        (
            ["--model.path=seeing", '--data.media_keys={video = "sounds"}', "--data.video_sound=true"],
            "data.video_sound",
            "has a model of type 'qwen3_vl', which hears nothing: qwen3_omni_moe does",
        ),
    ],
    ids=["server", "server without sound", "deaf", "fps", "deaf to videos"],
)
def test_combinations_that_are_not_known_are_refused(settings: list[str], setting: str, complaint: str) -> None:
    write_vision_model(Path("seeing"))
    for folder in ("seeing", "model"):
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({"text_config": {}, **json.loads(file.read_text())}))
    write_rows({"prompt": "What?"})
    found = {one.setting: one.message for one in check(load_file(Path("run.toml"), settings), call_reward=False)}
    assert complaint in found[setting]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"feature_size": 80}, "makes 80 bands of a sound, but config.json says 16"),
        ({"hop_length": 200}, "has 80 frames a second, 100 of which its tower takes at once: only 100 and 100"),
        ({"dither": 0.1}, "has no WhisperFeatureExtractor without dither"),
        ({"n_fft": None}, "is damaged: no usable"),
    ],
)
def test_models_without_usable_rules_are_refused(changes: Any, complaint: str) -> None:
    path = Path("model/preprocessor_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DataError, match=complaint) as caught:
        read_vision(Path("model"), WITH_SOUND)
    assert caught.value.field == "model.path"


def test_videos_have_the_sizes_of_the_processor_and_no_folders() -> None:
    wanted = WITH_ALL.model_copy(update={"max_video_tokens": 100})
    token = 32 * 32  # pixels
    expected = BlockRule(16, 2, 128 * token, 768 * token, 2, 2.0, 4, 768, total_pixels=2 * 100 * token)
    assert Qwen3OmniMoeProcessor.videos_kwargs["size"] == {"shortest_edge": 128 * token, "longest_edge": 768 * token}
    file = Path("model/video_preprocessor_config.json")
    assert json.loads(file.read_text())["size"]["longest_edge"] != 768 * token
    assert read_vision(Path("model"), wanted).video == expected
    file.unlink()
    assert read_vision(Path("model"), wanted).video == expected


def test_videos_have_the_settings_of_images_where_the_folder_has_none_of_theirs() -> None:
    usual = read_vision(Path("model"), WITH_ALL)
    Path("model/video_preprocessor_config.json").unlink()
    path = Path("model/preprocessor_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"video_processor_type": "Qwen2VLVideoProcessor"}))
    shared = Path("model/processor_config.json")
    shared.write_text(json.dumps({"processor_class": "Qwen3OmniMoeProcessor"}))
    assert BaseVideoProcessor.get_video_processor_dict("model")[0] == json.loads(path.read_text())
    assert read_vision(Path("model"), WITH_ALL) == usual
    settings = json.loads(path.read_text())
    shared.write_text(json.dumps({"image_processor": settings, "feature_extractor": settings}))
    path.unlink()
    with pytest.raises(OSError, match="Can't load video processor"):
        BaseVideoProcessor.get_video_processor_dict("model")
    with pytest.raises(DataError) as caught:
        read_vision(Path("model"), WITH_ALL)
    missing = "video_preprocessor_config.json is missing, and so is video_processor in processor_config.json"
    assert str(caught.value).startswith(
        f"model.path: model has no settings of its video processor: {missing}. Copy the"
    )


def test_a_folder_that_leaves_out_how_positions_grow_has_the_default_of_transformers() -> None:
    path = Path("model/config.json")
    config = json.loads(path.read_text())
    del config["thinker_config"]["position_id_per_seconds"]
    path.write_text(json.dumps(config))
    usual = Qwen3OmniMoeThinkerConfig().position_id_per_seconds
    with pytest.raises(DataError, match=f"has position_id_per_seconds {usual} in its thinker_config: only 13 is known"):
        read_vision(Path("model"), WITH_ALL)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"position_id_per_seconds": 25}, "has position_id_per_seconds 25 in its thinker_config: only 13 is known"),
        ({"audio_end_token_id": -1}, "lacks the ids of the tokens of video"),
        ({"video_token_id": -1}, "lacks the ids of the tokens of video"),
    ],
)
def test_models_without_usable_rules_for_video_are_refused(changes: Any, complaint: str) -> None:
    path = Path("model/config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"thinker_config": config["thinker_config"] | changes}))
    with pytest.raises(DataError, match=complaint):
        read_vision(Path("model"), WITH_ALL.model_copy(update={"video_sound": True}))


def test_rules_are_read_from_the_newer_file_too() -> None:
    usual = read_vision(Path("model"))
    path = Path("model/preprocessor_config.json")
    settings = json.loads(path.read_text())
    path.unlink()
    Path("model/processor_config.json").write_text(
        json.dumps({"image_processor": settings, "feature_extractor": settings})
    )
    assert read_vision(Path("model")) == usual
