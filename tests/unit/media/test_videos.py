"""Videos from files and lists of frames, in their normal form; sampling, sizes and patches against transformers."""

import importlib
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

from relaxd.media import videos
from relaxd.media.images import decode_png, patches
from relaxd.media.prompt_media import PromptMedia, with_own_sounds, with_references
from relaxd.media.sounds import SoundRule, decode_wav
from relaxd.media.sources import MediaError
from relaxd.media.videos import BlockRule, VideoRule, measure_video, normalise_video, own_sound
from relaxd.rewards import RewardInput
from tests.kit.cases import each
from tests.kit.sounds import sound
from tests.kit.vision import clip, encoded, encoded_clip

RULE = VideoRule(16, 2, 4096, 262144, times=2, fps=2.0, min_frames=4, max_frames=16)
CLIP = clip(12, 64, 96)


def test_sampling_sizes_and_times_are_those_of_transformers() -> None:
    processor = object.__new__(Qwen3VLVideoProcessor)  # its constructor needs torchvision
    processor.min_frames, processor.max_frames = RULE.min_frames, RULE.max_frames
    random = np.random.default_rng(0)
    for _ in range(3000):
        frames, rate = int(random.integers(2, 400)), float(random.choice([1, 4, 12.5, 24000 / 1001, 30, 60]))
        width, height = (int(side) for side in random.integers(20, 700, 2))
        size = videos.VideoSize.of(width, height, frames, rate, RULE)
        sampled = processor.sample_frames(VideoMetadata(total_num_frames=frames, fps=rate), fps=RULE.fps)
        assert list(size.sampled)[: len(sampled)] == sampled.tolist()
        assert size.sampled[len(sampled) :] == size.sampled[-1:] * (len(sampled) % 2)
        high, wide = smart_resize(len(sampled), height, width, 2, 32, RULE.min_pixels, RULE.max_pixels)
        assert size.normal == (wide, high)
        assert size.grid == (len(size.sampled) // 2, high // 16, wide // 16)


def test_blocks_have_the_frames_and_sizes_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):  # only its import needs them
        monkeypatch.setitem(sys.modules, f"torchvision{name}", ModuleType(f"torchvision{name}"))
    theirs = importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    processor = object.__new__(theirs.Qwen2VLVideoProcessor)
    processor.num_frames = None
    rule = BlockRule(16, 2, 4096, 65536, times=2, fps=2.0, min_frames=4, max_frames=17)
    limits = {"min_frames": 4, "max_frames": 17, "temporal_patch_size": 2, "fps": 2.0}
    random = np.random.default_rng(0)
    for _ in range(3000):
        frames, rate = int(random.integers(2, 400)), float(random.choice([1, 4, 12.5, 24000 / 1001, 30, 60]))
        width, height = (int(side) for side in random.integers(20, 700, 2))
        size = videos.VideoSize.of(width, height, frames, rate, rule)
        sampled = processor.sample_frames(VideoMetadata(total_num_frames=frames, fps=rate), **limits)
        # Rounding lets theirs have one more index, behind the last frame, and so fail, for some videos.
        assert list(size.sampled) == [index for index in sampled.tolist() if index < frames]
        high, wide = theirs.smart_resize(height, width, 32, rule.min_pixels, rule.max_pixels)
        assert size.normal == (wide, high)
        assert size.times == tuple(range(len(size.sampled) // 2))
    small = replace(rule, total_pixels=8 * 2048, max_frames=1)
    assert [small.resized_frames(frames, 640, 320) for frames in (2, 8)] == [(128, 64), (64, 32)]
    assert videos.VideoSize.of(64, 64, 9, 30.0, small).sampled == (0, 0)


@pytest.mark.parametrize("limit", [1, 20, 64, 256, 2048, 8192])
def test_a_block_has_at_most_the_tokens_of_its_limit(limit: int) -> None:
    token = 32 * 32  # pixels
    rule = BlockRule(16, 2, 128 * token, 768 * token, 2, 2.0, 4, 768, total_pixels=2 * limit * token)
    sides = (9, 48, 64, 224, 640, 1600)
    found = {
        (frames, wide, high): videos.VideoSize.of(wide, high, frames, 30.0, rule)
        for frames in (2, 5, 30, 900)
        for wide in sides
        for high in sides
    }
    assert max(size.tokens for size in found.values()) <= limit
    if limit == 2048:
        assert found[900, 224, 224].tokens == 30 * 8 * 8
    one_frame = replace(rule, max_frames=1)
    assert videos.VideoSize.of(640, 480, 30, 30.0, one_frame).tokens <= limit


@pytest.mark.parametrize("limit", [1, 3, 20, 64, 256, 2048])
def test_a_video_has_at_most_the_tokens_of_its_limit(limit: int) -> None:
    token = 32 * 32  # pixels
    total = 2 * limit * token
    rule = VideoRule(16, 2, min(4096, total), total, times=2, fps=2.0, min_frames=4, max_frames=768, total_pixels=total)
    model_rule = replace(rule, total_pixels=0)
    exceeding = 0
    for frames in (2, 5, 7, 30, 900, 9000):
        for wide in (9, 48, 64, 224, 640, 1600):
            for high in (9, 48, 64, 224, 640, 1600):
                size = videos.VideoSize.of(wide, high, frames, 30.0, rule)
                usual = videos.VideoSize.of(wide, high, frames, 30.0, model_rule)
                assert 0 < size.tokens <= limit
                if usual.tokens <= limit:  # what fits is as the model's rule has it
                    assert size == usual
                exceeding += usual.tokens > limit
    assert exceeding


def test_a_file_and_its_frames_are_the_same_video(tmp_path: Path) -> None:
    file = tmp_path / "clip.mkv"
    file.write_bytes(encoded_clip(CLIP, rate=2))
    found = normalise_video(str(file), RULE)
    assert found.size.sampled == tuple(range(12))
    assert found.size.times == (0.25, 1.25, 2.25, 3.25, 4.25, 5.25)
    assert found.size.normal == (64, 96)
    np.testing.assert_array_equal(decode_png(found.content), np.concatenate([np.asarray(frame) for frame in CLIP]))
    assert normalise_video([encoded(frame) for frame in CLIP], RULE) == found
    assert normalise_video({"bytes": file.read_bytes()}, RULE) == found
    assert normalise_video(file.as_uri(), RULE) == found
    assert found.media_type == "image/png; frames=12"
    others = [[*CLIP[1::-1], *CLIP[2:]], CLIP[:-1]]
    for other in others:
        assert normalise_video([encoded(frame) for frame in other], RULE).sha256 != found.sha256
    coarse = VideoRule(16, 2, 4096, 262144, times=2, fps=1.0, min_frames=4, max_frames=16)
    assert normalise_video(str(file), coarse).size.sampled == (0, 2, 4, 7, 9, 11)
    assert normalise_video(str(file), coarse).sha256 != found.sha256


def test_a_videos_own_sound_is_stored_behind_its_frames() -> None:
    rule = BlockRule(16, 2, 4096, 65536, times=2, fps=2.0, min_frames=4, max_frames=16, sound=SoundRule(5.0))
    samples = sound(1.5)
    silent, content = encoded_clip(CLIP, 2), encoded_clip(CLIP, 2, samples=samples)
    found = normalise_video(content, rule)
    assert (found.size.grid, found.size.tokens) == ((6, 6, 4, 150), 36 + 20)
    assert measure_video(content, rule) == found.size
    np.testing.assert_array_equal(decode_wav(own_sound(found.content)), samples)
    np.testing.assert_array_equal(decode_png(found.content), decode_png(normalise_video(silent, rule).content))
    (stored,) = PromptMedia.of([found]).items()
    assert (stored.content, stored.grid, stored.media_type) == (found.content, found.size.grid, found.media_type)
    media = PromptMedia.of([found])
    assert media.by_hash() == {found.sha256: found.content}
    sounded = with_own_sounds(media.records, media.by_hash())
    assert list(sounded.values()) == [found.content, own_sound(found.content)]
    with pytest.raises(MediaError, match=f"has no bytes of video {found.sha256}"):
        with_own_sounds(media.records, {})
    empty = encoded_clip(CLIP, 2, samples=samples[:0])
    assert normalise_video(empty, rule) == normalise_video(silent, rule)
    without = [
        normalise_video(silent, rule),
        normalise_video([encoded(frame) for frame in CLIP], rule),
        normalise_video(content, replace(rule, sound=None)),
    ]
    assert [one.size.grid for one in without] == [(6, 6, 4)] * 3
    other = normalise_video(encoded_clip(CLIP, 2, samples=sound(1.5, 1)), rule)
    assert len({one.sha256 for one in (found, other, *without[::2])}) == 4
    for wrong, complaint in (
        (replace(rule, sound=SoundRule(1.0)), "is a video whose own sound is longer than data.max_audio_seconds = 1:"),
        (
            replace(rule, sound=SoundRule(5.0, rate=100)),
            "is a video whose own sound has 150 samples: a sound must have",
        ),
    ):
        with pytest.raises(MediaError, match=complaint):
            normalise_video(content, wrong)
    with pytest.raises(MediaError, match="is a broken video: its PNG has no end"):
        own_sound(without[0].content[:-12])


def test_frames_are_sampled_and_resized_and_the_last_one_fills_up() -> None:
    small = VideoRule(16, 2, 4096, 8192, times=2, fps=1.0, min_frames=3, max_frames=3)
    found = normalise_video(encoded_clip(CLIP), small)
    assert found.size.sampled == (0, 6, 11, 11)
    assert found.size.times == (0.75, 2.75)
    assert found.size.normal == (32, 64)
    expected = [np.asarray(CLIP[index].resize((32, 64), Image.Resampling.BICUBIC)) for index in found.size.sampled]
    np.testing.assert_array_equal(decode_png(found.content), np.concatenate(expected))
    assert (found.size.grid, found.size.tokens) == ((2, 4, 2), 4)


@pytest.mark.parametrize("frames", [4, 5])
def test_patches_are_those_of_transformers(frames: int) -> None:
    import torch

    chosen = clip(frames, 64, 96, 1)
    found = normalise_video([encoded(frame) for frame in chosen], RULE)
    mean, std = (0.1, 0.2, 0.3), (0.3, 0.2, 0.1)
    ours = patches(decode_png(found.content), RULE, found.size.grid, mean, std, 2)
    pixels = (np.stack([np.asarray(frame) for frame in chosen]) * (1 / 255)).astype(np.float32)
    normal = torch.from_numpy((pixels - np.float32(mean)) / np.float32(std)).permute(0, 3, 1, 2)
    theirs, *grid = object.__new__(Qwen3VLVideoProcessor).patchify(normal[None], 16, 2, 2)
    assert tuple(grid) == found.size.grid
    np.testing.assert_array_equal(ours, theirs[0])


@pytest.mark.parametrize(
    ("kind", "codec", "pixels"),
    [
        ("mp4", "mpeg4", "yuv420p"),
        ("mov", "mpeg4", "yuv420p"),
        ("webm", "libvpx-vp9", "yuv420p"),
        ("avi", "mpeg4", "yuv420p"),
        ("gif", "gif", "rgb8"),
    ],
)
def test_formats_are_decoded(kind: str, codec: str, pixels: str) -> None:
    content = encoded_clip(CLIP, 4, kind, codec, pixels)
    size = measure_video(content, RULE)
    found = normalise_video(content, RULE)
    assert found.size == size
    assert size.sampled == (0, 2, 4, 7, 9, 11)
    np.testing.assert_allclose(size.times, [index / 8 for index in (2, 11, 20)], atol=0.01)
    expected = np.concatenate([np.asarray(CLIP[index]) for index in size.sampled]).astype(float)
    assert np.abs(decode_png(found.content) - expected).mean() < 30


def test_turned_videos_are_made_upright() -> None:
    content = bytearray(encoded_clip(CLIP, 2, "mov", "png", "rgb24"))
    begin = content.index(b"tkhd") + 4 + 40  # of the matrix, behind the header of version 0
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)  # by 90 degrees, clockwise
    content[begin : begin + 36] = turned
    found = normalise_video(bytes(content), RULE)
    assert found.size.original == (96, 64)
    expected = np.concatenate([np.rot90(np.asarray(frame), -1) for frame in CLIP])
    np.testing.assert_array_equal(decode_png(found.content), expected)
    assert measure_video(bytes(content), RULE) == found.size


def test_frames_before_an_edit_are_left_out() -> None:
    """As in a part of a file that was cut out without encoding it again."""
    content = bytearray(MP4)
    place = content.index(b"elst") + 4 + 8 + 4  # of the media's time, behind version, count and duration
    (begin,) = struct.unpack_from(">i", content, place)
    (scale,) = struct.unpack_from(">I", content, content.index(b"mdhd") + 4 + 12)
    struct.pack_into(">i", content, place, begin + scale * 3 // 4)  # three frames
    found = normalise_video(bytes(content), RULE)
    assert found.size == measure_video(bytes(content), RULE)
    assert found.size.sampled[-1] == 8
    whole = decode_png(normalise_video(MP4, VideoRule(16, 2, 4096, 262144, 2, 4.0, 4, 16)).content)
    np.testing.assert_array_equal(decode_png(found.content)[:96], whole[3 * 96 : 4 * 96])


def sound_file() -> bytes:
    """Return a file that has sound and no video."""
    import io

    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
        frame.rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


LOSSLESS = encoded_clip(CLIP)
MP4 = encoded_clip(CLIP, 4, "mp4", "mpeg4", "yuv420p")
AVI = encoded_clip(CLIP, 4, "avi", "mpeg4", "yuv420p")


@each(
    ("source", "complaint"),
    [
        (b"nothing", r"is no video in a format that is read \(MP4 or QuickTime, WebM or Matroska, AVI, GIF\)"),
        (b"#EXTM3U\nfile:///etc/passwd", "is no video in a format that is read"),
        (encoded(CLIP[0]), "is no video in a format that is read"),
        ("no.mp4", "is 'no.mp4', which is no file here"),
        ("https://name:secret@host/a.mp4", "is a URL of host: relaxd fetches no media"),
        (MP4[:-200], "is a broken video"),
        (LOSSLESS[:300], "is a broken video|without frames"),
        (AVI[: len(AVI) // 2], r"is a broken video: it says 12 frames, but has only \d"),
        (sound_file(), "is a file without video"),
        (encoded_clip(CLIP[:1]), r"has too few frames \(1\): a video must have at least 2"),
        (encoded(CLIP[0], "GIF"), "has too few frames"),
        ([], "is an empty list"),
        ([encoded(CLIP[0])], "has too few frames"),
        ([encoded(CLIP[0]), b"x"], "has a wrong frame: frame 1 is no image in a format"),
        ([encoded(CLIP[0]), encoded(clip(1, 32, 32)[0])], r"has frames of different sizes: \(64, 96\) and, at 1, \(32"),
        (encoded_clip(clip(4, 640, 2), pixels="bgr0"), "is 640 x 2 pixels: each side must have at least 8"),
    ],
)
def test_wrong_videos_are_refused(source: Any, complaint: str) -> None:
    with pytest.raises(MediaError, match=complaint):
        normalise_video(source, RULE)


def test_frames_that_a_file_lacks_are_missed() -> None:
    broken = bytearray(MP4)
    begin = broken.index(b"mdat") + 400
    broken[begin : begin + 20_000] = bytes(len(broken[begin : begin + 20_000]))
    with pytest.raises(MediaError, match="is a broken video"):
        normalise_video(bytes(broken), RULE)


def test_long_videos_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "MAX_FRAMES", 10)
    for source in (LOSSLESS, [encoded(frame) for frame in CLIP]):
        with pytest.raises(MediaError, match="has 12 frames: at most 10 are read, cut it into parts"):
            measure_video(source, RULE)


def test_rewards_open_the_frames_of_videos() -> None:
    video = normalise_video([encoded(frame) for frame in CLIP[:4]], RULE)
    media = PromptMedia.of([video])
    (message,) = with_references([{"role": "user", "content": [{"type": "video"}]}], [video])
    sample = RewardInput(prompt="<video>", response="", answer="", prompt_messages=[message], media=media.by_hash())
    ((*frames,),) = sample.videos()
    assert sample.images() == []
    for found, frame in zip(frames, CLIP[:4], strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(frame))
    with pytest.raises(ValueError, match=f"video {video.sha256} isn't here: set reward.media = true"):
        RewardInput(prompt="<video>", response="", answer="", prompt_messages=[message]).videos()
