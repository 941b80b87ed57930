"""Sounds in their normal form: formats, rates, channels, hashes and what is refused."""

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relaxd.data.towers import spectrogram
from relaxd.media.media_tokens import MediaTokens, expand, lay_out, sound_tokens
from relaxd.media.sounds import SoundRule, decode_wav, measure_sound, normalise_sound
from relaxd.media.sources import MediaError
from relaxd.rewards.interface import RewardInput
from tests.kit.cases import each
from tests.kit.sounds import encoded_sound, sound
from tests.kit.vision import encoded, encoded_clip, picture

RULE = SoundRule(10.0)
SOUND = sound(1.5)
TOKENS = MediaTokens(token=9, merge=2, audio=8)


def wav(samples: np.ndarray, channels: int = 1, width: int = 2, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(channels)
        written.setsampwidth(width)
        written.setframerate(rate)
        written.writeframes(samples.tobytes())
    return file.getvalue()


def test_samples_at_the_models_rate_stay_bit_for_bit() -> None:
    found = normalise_sound(wav(SOUND), RULE)
    np.testing.assert_array_equal(decode_wav(found.content), SOUND)
    assert (found.size.grid, found.size.tokens, found.size.seconds) == ((150,), 20, 1.5)
    assert found.size.shown == ("16,000 Hz, 1 channel", "24,000 samples", "1.50 s")
    for kind, codec in (("flac", "flac"), ("matroska", "pcm_s16le")):
        same = normalise_sound(encoded_sound(SOUND, kind, codec), RULE)
        assert (same.sha256, same.content) == (found.sha256, found.content)
    floats = {"array": (SOUND / 32768).tolist(), "sampling_rate": 16_000}
    assert normalise_sound(floats, RULE).sha256 == found.sha256
    assert measure_sound(wav(SOUND), RULE) == found.size
    assert normalise_sound(wav(sound(1.5, 1)), RULE).sha256 != found.sha256
    assert normalise_sound(wav(SOUND), SoundRule(10.0, rate=8_000)).sha256 != found.sha256
    assert normalise_sound(wav(SOUND), SoundRule(2.0)).sha256 == found.sha256  # a limit changes no sample


@pytest.mark.parametrize(
    ("kind", "codec", "rate", "layout", "delay"),
    [
        ("wav", "pcm_s24le", 44_100, "stereo", 0),
        ("flac", "flac", 48_000, "mono", 0),
        ("mp3", "libmp3lame", 44_100, "stereo", 0),
        ("ogg", "libopus", 48_000, "mono", 0),
        ("adts", "aac", 44_100, "mono", 1024 * 16_000 // 44_100),
    ],
)
def test_formats_rates_and_channels_give_nearly_the_same_sound(
    kind: str, codec: str, rate: int, layout: str, delay: int
) -> None:
    """By spectrogram: it is what the model gets, and what lossy formats keep."""
    found = normalise_sound(encoded_sound(SOUND, kind, codec, rate, layout), RULE)
    assert found.size.original == (rate, 2 if layout == "stereo" else 1)
    samples = decode_wav(found.content)[delay:]
    assert abs(len(samples) - len(SOUND)) < 1100
    ours, own = (spectrogram(one[:22_000], RULE) for one in (samples, SOUND))
    assert (ours - own).abs().mean() < 0.12
    assert (ours - spectrogram(sound(1.5, 1)[:22_000], RULE)).abs().mean() > 0.2


def test_channels_are_mixed() -> None:
    left, right = SOUND, sound(1.5, 1)
    found = decode_wav(normalise_sound(wav(np.stack([left, right], 1), 2), RULE).content)
    mean = (left.astype(np.float64) + right) / 2
    assert np.abs(found - mean).max() <= 1


@each("samples", [400, 559, 560, 12_345, 15_999, 16_000, 16_160, 17_440, 33_333])
def test_tokens_and_spectrograms_are_those_of_transformers(samples: int) -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    one = sound(samples / 16_000)
    found = normalise_sound(wav(one), RULE)
    theirs = WhisperFeatureExtractor(feature_size=128)(
        [one / np.float32(32_768)],
        sampling_rate=16_000,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    frames = int(theirs.attention_mask.sum())
    assert found.size.grid == (frames,)
    assert found.size.tokens == int(_get_feat_extract_output_lengths(torch.tensor(frames)))
    assert torch.equal(spectrogram(decode_wav(found.content), RULE), theirs.input_features[0])


def test_tokens_of_every_length() -> None:
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    frames = torch.arange(1, 1001)
    assert [sound_tokens(int(one)) for one in frames] == _get_feat_extract_output_lengths(frames).tolist()


def test_sounds_have_the_positions_of_text_and_images_theirs() -> None:
    grids = [(100,), (1, 4, 6), (30,)]
    tokens = expand([1, 8, 2, 9, 8, 3], grids, TOKENS)
    found = lay_out(tokens, grids, TOKENS)
    assert found.modality.tolist() == [0, *[3] * 13, 0, *[1] * 6, *[3] * 4, 0]
    assert found.positions[:, :15].tolist() == [list(range(15))] * 3
    assert found.positions[:, 15:21].tolist() == [[15] * 6, [15, 15, 15, 16, 16, 16], [15, 16, 17] * 2]
    assert found.positions[:, 21:].tolist() == [[18, 19, 20, 21, 22]] * 3
    assert found.next_position == 23
    placed = lay_out(np.concatenate([tokens, [8]]), grids, TOKENS, begins=[1, 15, 21])
    assert placed.modality.tolist() == [*found.modality, 0]  # a token of sound that was sampled
    with pytest.raises(MediaError, match=r"has 2 sound tokens .id 8. for 1 sounds"):
        expand([8, 8], [(10,)], TOKENS)
    with pytest.raises(MediaError, match="has its media in another order"):
        expand([8, 9], [(1, 2, 2), (10,)], TOKENS)
    with pytest.raises(MediaError, match="has other tokens among those of the item that begins at token 0"):
        lay_out(np.array([9, 9]), [(10,)], TOKENS)


BROKEN = encoded_sound(SOUND, "flac", "flac")


@each(
    ("source", "complaint"),
    [
        (b"RIFF", "is no sound in a format that is read (WAV, FLAC, MP3, Ogg, AAC, MP4 or QuickTime, WebM or Matr"),
        (encoded(picture(64, 64)), "is no sound in a format that is read"),
        (BROKEN[: len(BROKEN) // 2], "is a broken sound: Invalid data"),
        (wav(SOUND)[:-1000], "is a broken sound: its file says 48,044 bytes, but has 47,044"),
        (encoded_clip([picture(64, 64)] * 4, 4, "mp4", "mpeg4", "yuv420p"), "is a file without sound"),
        (wav(SOUND[:0]), "has 0 samples: a sound must have at least 400 at 16,000 a second"),
        (wav(SOUND[:399]), "has 399 samples: a sound must have"),
        (wav(sound(10.1)), "is longer than data.max_audio_seconds = 10: cut it"),
        (wav(SOUND, rate=2_000), "has 2,000 samples a second: it must have 4,000 to 384,000"),
        ({"array": [0.0] * 500, "sampling_rate": "16000"}, "has \"sampling_rate\" '16000': it must be a whole number"),
        ({"array": [0.0] * 500, "sampling_rate": 16000.5}, 'has "sampling_rate" 16000.5: it must be a whole number'),
        ({"array": [0.0] * 500, "sampling_rate": True}, 'has "sampling_rate" True'),
        ({"array": [0.0] * 500, "sampling_rate": 0}, "has 0 samples a second"),
        ({"array": [0.0] * 500}, 'has "sampling_rate" None'),
        ({"array": ["a"], "sampling_rate": 16000}, 'has an "array" that is no list of numbers'),
        ({"array": [[0.0], [0.0]], "sampling_rate": 16000}, 'has an "array" of 2 dimensions'),
        ({"array": [2.0] * 500, "sampling_rate": 16000}, 'has an "array" with numbers beyond -1 and 1'),
        ({"array": [float("nan")] * 500, "sampling_rate": 16000}, "with numbers beyond -1 and 1"),
        ({"array": [], "sampling_rate": 16000}, "has 0 samples"),
        ("nowhere.wav", "is 'nowhere.wav', which is no file here"),
        ("https://me:secret@host/a.wav", "is a URL of host: relaxd fetches no media"),
    ],
)
def test_wrong_sounds_are_refused(source: Any, complaint: str) -> None:
    with pytest.raises(MediaError) as caught:
        normalise_sound(source, RULE)
    assert complaint in str(caught.value)
    assert "secret" not in str(caught.value)


def test_items_have_every_form(tmp_path: Path) -> None:
    content = encoded_sound(SOUND, "mp3", "libmp3lame")
    (tmp_path / "a.mp3").write_bytes(content)
    text = base64.b64encode(content).decode()
    items = [str(tmp_path / "a.mp3"), content, text, f"data:audio/mp3;base64,{text}", {"bytes": content, "path": None}]
    assert len({normalise_sound(one, RULE).sha256 for one in items}) == 1


def test_rewards_open_sounds_that_are_there() -> None:
    found = normalise_sound(wav(SOUND), RULE)
    part = {"type": "audio", "uri": "sha256:...", "media_type": found.media_type, "sha256": found.sha256}
    message = {"role": "user", "content": [part]}
    given: dict[str, Any] = {"prompt": "<audio>", "response": "", "prompt_messages": [message]}
    sample = RewardInput(**given, media={found.sha256: found.content})
    (heard,) = sample.sounds()
    np.testing.assert_array_equal(heard, SOUND)
    assert sample.images() == []
    with pytest.raises(ValueError, match=r"audio .* isn't here: set reward.media = true"):
        RewardInput(**given).sounds()
