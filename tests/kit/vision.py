"""A folder of a model that sees images and video, with all but its weights, and pictures and clips to look at."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from relaxd.config import DataConfig
from relaxd.data.vision import CLIP_MEAN, CLIP_STD, VisionModel
from relaxd.media.images import normalise_image
from relaxd.media.kinds import NormalMedia
from relaxd.media.media_tokens import expand
from relaxd.media.prompt_media import PromptMedia
from relaxd.media.sounds import encode_wav, normalise_sound
from relaxd.media.videos import BlockRule, VideoRule, normalise_video
from tests.kit.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SoundClip:
    """The frames of a clip and the samples of its own sound, which have two a second and 16,000."""

    frames: Sequence[Image.Image]
    samples: np.ndarray


Item = Image.Image | Sequence[Image.Image] | np.ndarray | SoundClip
"""A picture, the frames of a clip, the samples of a sound, or a clip with its sound."""
WITH_VIDEO = DataConfig(source="addition", media_keys={"image": "images", "video": "videos"})
"""Settings of data with images and video."""
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type != 'text' %}<|vision_start|><|{{ c.type }}_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As the templates of Qwen2.5-VL and Qwen3-VL, without tools."""
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64},
}


def write_vision_model(folder: Path, model_type: str = "qwen3_vl", patch: int = 16) -> Path:
    """Write tokenizer, template, configuration, processors of 4 to 64 tokens an image; returns the folder."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    area = (2 * patch) ** 2
    processor = PROCESSOR | {"patch_size": patch, "size": {"shortest_edge": area * 4, "longest_edge": area * 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    size = {"shortest_edge": area * 4, "longest_edge": area * 256}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(processor | {"size": size}))
    config = {
        "model_type": model_type,
        **{name: tokenizer.token_to_id(token) for name, token in TOKENS.items()},
        "vision_config": {"patch_size": patch, "spatial_merge_size": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a smooth random picture."""
    noise = np.random.default_rng(seed).integers(0, 255, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file's content."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def clip(frames: int, width: int, height: int, seed: int = 0) -> list[Image.Image]:
    """Return smooth random pictures."""
    return [picture(width, height, 1000 * seed + number) for number in range(frames)]


def encoded_clip(
    frames: Sequence[Image.Image],
    rate: float = 4.0,
    kind: str = "matroska",
    codec: str = "ffv1",
    pixels: str = "bgr0",
    samples: np.ndarray | None = None,
) -> bytes:
    """Return a clip as a file's content, without loss unless the codec says otherwise, with 16,000 samples a second."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=Fraction(rate).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, pixels
        heard = None if samples is None else container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
        if heard is not None and samples is not None and len(samples):
            sound = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            sound.sample_rate = 16_000
            container.mux([*heard.encode(sound), *heard.encode()])
    return file.getvalue()


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
"""Fields of the decoder of a mixture."""
STACKED = ("experts.gate_up_proj", "experts.down_proj")
"""Ends of the names of tensors that have a layer's experts."""


def make_vision_model(
    folder: Path,
    *,
    tied: bool = True,
    seed: int = 1,
    noise: float = 0.1,
    tower: Mapping[str, Any] = TOWER,
    model_type: str = "qwen3_vl",
    **text: Any,
) -> Path:
    """Write a tiny random Qwen3-VL in float32, with sharp logits and no zeros and ones: mix-ups show."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    write_vision_model(folder, model_type)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(token) for name, token in TOKENS.items()}
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        text_config={**TEXT, "vocab_size": size, **text},
        vision_config=dict(tower),
        tie_word_embeddings=tied,
        **ids,
    )
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(folder)
    return folder


def with_published_experts(folder: Path) -> Path:
    """Give a Qwen3-VL-MoE that transformers wrote the experts of published models, transposed; returns the folder."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(STACKED):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def normal_media(vision: VisionModel, items: Sequence[Item]) -> list[NormalMedia]:
    """Return items in their normal form."""
    kind = BlockRule if vision.tokens.second else VideoRule
    rule = kind(vision.rule.patch, 2, 4096, 262144, times=vision.times, fps=2.0, min_frames=4, max_frames=768)
    found: list[NormalMedia] = []
    for one in items:
        if isinstance(one, np.ndarray):
            assert vision.sound is not None
            found.append(normalise_sound(encode_wav(one, vision.sound.rate), vision.sound))
        elif isinstance(one, Image.Image):
            found.append(normalise_image(encoded(one), vision.rule))
        elif isinstance(one, SoundClip):
            assert isinstance(rule, BlockRule)
            content = encoded_clip(one.frames, 2.0, samples=one.samples)
            found.append(normalise_video(content, replace(rule, sound=vision.sound)))
        else:
            found.append(normalise_video([encoded(frame) for frame in one], rule))
    return found


def mark_of(kind: str, vision: VisionModel) -> int:
    """Return the token of a kind of media."""
    tokens = vision.tokens
    return {"image": tokens.token, "video": tokens.video, "audio": tokens.audio}[kind]


def prompt_with_media(vision: VisionModel, items: Sequence[Item]) -> tuple[list[int], PromptMedia]:
    """Return a prompt with media between text."""
    media = normal_media(vision, items)
    short = [5, 6]
    for number, one in enumerate(media):
        short += [mark_of(one.kind, vision), 40 + number]
    return expand_media(short, media, vision), PromptMedia.of(media)


def expand_media(short: Sequence[int], media: Sequence[NormalMedia], vision: VisionModel) -> list[int]:
    """Return a prompt with the tokens of its items, in which the texts of times are two tokens."""
    labels = [[(50 + number, 51) for number in range(len(one.size.times))] for one in media]
    grids, times = ([getattr(one.size, name) for one in media] for name in ("grid", "times"))
    tokens: list[int] = expand(short, grids, vision.tokens, labels, times).tolist()
    return tokens


def without_media(answer: list[int], vision: VisionModel) -> list[int]:
    """Return an answer up to its first token of media: transformers can't compute what follows one."""
    marks = vision.tokens.modalities
    return answer[: next((place for place, token in enumerate(answer) if token in marks), len(answer))]


def seen_by_transformers(items: Sequence[Item]) -> "dict[str, torch.Tensor]":
    """Return what transformers' own processors make of pictures, and of clips whose frames need no resizing."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    pictures = [one for one in items if isinstance(one, Image.Image)]
    found: dict[str, Any] = {}
    if pictures:
        found |= Qwen2VLImageProcessorPil(patch_size=16, size=PROCESSOR["size"])(pictures, return_tensors="pt")
    videos = object.__new__(Qwen3VLVideoProcessor)  # its constructor needs torchvision
    mean, std = torch.tensor(CLIP_MEAN), torch.tensor(CLIP_STD)
    clips: list[torch.Tensor] = []
    for one in items:
        if not isinstance(one, Image.Image | np.ndarray):
            one = one.frames if isinstance(one, SoundClip) else one
            pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in one]))
            normal = ((pixels.double() / 255).float() - mean) / std
            clips.append(normal.permute(0, 3, 1, 2))
    if clips:
        sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": None, "resample": None}
        done = {"do_convert_rgb": False, "do_resize": False, "do_rescale": False, "do_normalize": False}
        rest = {"rescale_factor": 1.0, "image_mean": None, "image_std": None, "cap_pixels_per_frame": False}
        found |= videos._preprocess(clips, **sizes, **done, **rest)
    return found


def image_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], items: Sequence[Item]) -> "torch.Tensor":
    """Return log-probs of an answer by transformers' own processors and forward pass, without cache or padding."""
    import torch

    seen = seen_by_transformers(items)
    ids = torch.tensor([[*prompt, *answer]])
    modality = (ids == model.config.image_token_id).long() + 2 * (ids == model.config.video_token_id).long()
    modality[:, len(prompt) :] = 0
    inputs = {name: value.to(model.device) for name, value in {**seen, "mm_token_type_ids": modality}.items()}
    with torch.no_grad():
        logits = model(ids.to(model.device), **inputs).logits[0, len(prompt) - 1 : -1].cpu()
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
