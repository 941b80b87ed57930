"""A folder of a model that sees and hears, Qwen3-Omni's thinker, and sounds to hear."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from relaxd.config import DataConfig
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import read_vision
from relaxd.media.prompt_media import PromptMedia
from relaxd.media.sounds import encode_wav
from tests.kit.tokenizer import write_tokenizer
from tests.kit.vision import PROCESSOR, TEXT, TOWER, Item, SoundClip, normal_media, seen_by_transformers

if TYPE_CHECKING:
    import torch

RATE = 16_000
BANDS = 16
WITH_SOUND = DataConfig(source="addition", media_keys={"image": "images", "audio": "sounds"})
"""Settings of data with images and sound."""
WITH_ALL = DataConfig(source="addition", media_keys={"image": "images", "video": "videos", "audio": "sounds"})
"""Settings of data with images, video and sound."""
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "audio_token_id": "<|audio_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% elif c.type == 'audio' %}"
    "<|audio_start|><|audio_pad|><|audio_end|>{% else %}<|vision_start|><|{{ c.type }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As the template of Qwen3-Omni, without tools."""
EXTRACTOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": BANDS,
    "sampling_rate": RATE,
    "hop_length": 160,
    "n_fft": 400,
    "dither": 0.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EARS = {
    "num_mel_bins": BANDS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "output_dim": 64,
    "downsample_hidden_size": 8,
    "max_source_positions": 100,
    "n_window": 50,
}


def write_omni_model(
    folder: Path, *, tower: Mapping[str, Any] = TOWER, ears: Mapping[str, Any] = EARS, **text: Any
) -> Path:
    """Write tokenizer, template, configuration and processors; returns the folder."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(TOKENS.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | EXTRACTOR))  # one file, as the model's own
    (folder / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    ids = {name: tokenizer.token_to_id(token) for name, token in TOKENS.items()}
    thinker = {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": {**TEXT, **EXPERTS, "vocab_size": tokenizer.get_vocab_size(), **text},
        "vision_config": dict(tower),
        "audio_config": dict(ears),
        "position_id_per_seconds": 13,
        "tie_word_embeddings": False,
        **ids,
    }
    config = {"model_type": "qwen3_omni_moe", "thinker_config": thinker, "enable_audio_output": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_omni_model(
    folder: Path, *, seed: int = 1, noise: float = 0.1, hearing_noise: float = 0.0, **sizes: Any
) -> Path:
    """Write a tiny random Qwen3-Omni without its talker, with sharp logits and no zeros and ones: mix-ups show.

    With more noise in the matrices of the tower that hears (`hearing_noise`) sounds differ more.
    """
    import torch
    from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration

    config = AutoConfig.from_pretrained(write_omni_model(folder, **sizes))
    torch.manual_seed(seed)
    model = Qwen3OmniMoeForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            of_hearing = hearing_noise if "audio_tower" in name and parameter.dim() > 1 else 0.0
            parameter.add_(torch.randn_like(parameter) * (noise + of_hearing))
    model.save_pretrained(folder)
    return folder


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Return a random chord in noise, int16."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    wave = sum(np.sin(2 * np.pi * pitch * time) for pitch in random.uniform(100, 3000, 3))
    samples: np.ndarray = (4000 * wave + random.normal(0, 500, len(time))).astype(np.int16)
    return samples


def encoded_sound(
    samples: np.ndarray, kind: str = "wav", codec: str = "pcm_s16le", rate: int = RATE, layout: str = "mono"
) -> bytes:
    """Return a sound as a file's content, by FFmpeg."""
    import av

    if (kind, codec, rate, layout) == ("wav", "pcm_s16le", RATE, "mono"):
        return encode_wav(samples, RATE)
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)  # type: ignore[call-overload]
        wanted = stream.codec_context
        resampler = av.AudioResampler(
            format=wanted.format, layout=layout, rate=rate, frame_size=wanted.frame_size or None
        )
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        for one in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(one))
        container.mux(stream.encode())
    return file.getvalue()


def features_of(samples: np.ndarray) -> "torch.Tensor":
    """Return the features of a sound that transformers makes of it alone, [bands, frames]."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=BANDS)
    found = extractor(
        [samples.astype(np.float32) / 32768],
        sampling_rate=RATE,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    features: torch.Tensor = found.input_features[0][:, : int(found.attention_mask.sum())]
    return features


def heard_by_transformers(sounds: "list[np.ndarray]") -> "dict[str, torch.Tensor]":
    """Return what transformers' model takes of sounds, each of which was processed alone."""
    import torch

    features = [features_of(one) for one in sounds]
    longest = max((one.shape[1] for one in features), default=0)
    padded = [torch.nn.functional.pad(one, (0, longest - one.shape[1])) for one in features]
    mask = [[1] * one.shape[1] + [0] * (longest - one.shape[1]) for one in features]
    return {"input_features": torch.stack(padded), "feature_attention_mask": torch.tensor(mask)}


def omni_prompt(folder: Path, items: Sequence[Item]) -> tuple[list[int], PromptMedia]:
    """Return a prompt that has pictures, clips and sounds, with their marks around them, as the template writes it."""
    vision = read_vision(folder)
    parts: list[dict[str, Any]] = []
    media = normal_media(vision, items)
    for number, one in enumerate(media):
        parts += [{"type": one.kind}, {"type": "text", "text": f"{number}?"}]
    example = Example([{"role": "user", "content": parts or "What?"}], media=tuple(items))  # type: ignore[arg-type]
    return PromptTokenizer(folder, vision=vision).encode_seen(example, media).tolist(), PromptMedia.of(media)


def omni_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], items: Sequence[Item]) -> "torch.Tensor":
    """Return log-probs of an answer by transformers' whole forward pass, without cache or padding.

    Either all clips have sounds of their own or none: transformers has no positions for both in a prompt.
    """
    import torch

    ids = torch.tensor([[*prompt, *answer]])
    clips = [one for one in items if isinstance(one, SoundClip)]
    both = [one.samples if isinstance(one, SoundClip) else one for one in items]
    sounds = [one for one in both if isinstance(one, np.ndarray)]
    shown = [one for one in items if not isinstance(one, np.ndarray)]
    heard: dict[str, Any] = heard_by_transformers(sounds) if sounds else {}
    heard |= {"use_audio_in_video": True} if clips else {}
    seen = seen_by_transformers(shown) if shown else {}
    if "video_grid_thw" in seen:  # two frames a second
        seen["video_second_per_grid"] = torch.ones(len(seen["video_grid_thw"]))
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids), **heard, **seen).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer, dtype=torch.int64)[:, None])[:, 0]


def without_marks(answer: list[int], folder: Path) -> list[int]:
    """Return an answer up to its first token of media or mark of one: transformers can't compute what follows one."""
    thinker = json.loads((folder / "config.json").read_text())["thinker_config"]
    marks = {thinker[name] for name in TOKENS}
    return answer[: next((place for place, token in enumerate(answer) if token in marks), len(answer))]
