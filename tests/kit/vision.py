"""A folder of a model that sees images, with all but its weights, and pictures to look at."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from relaxd.data.vision import VisionModel
from relaxd.media import expand, normalise_image
from relaxd.media.prompt_media import PromptMedia
from tests.kit.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As the templates of Qwen2.5-VL and Qwen3-VL, without tools."""
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64},
}


def write_vision_model(folder: Path, model_type: str = "qwen3_vl", patch: int = 16) -> Path:
    """Write tokenizer, template, configuration, image processor of 4 to 64 tokens an image; returns the folder."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    area = (2 * patch) ** 2
    processor = PROCESSOR | {"patch_size": patch, "size": {"shortest_edge": area * 4, "longest_edge": area * 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    config = {
        "model_type": model_type,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
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


def make_vision_model(
    folder: Path, *, tied: bool = True, seed: int = 1, noise: float = 0.1, tower: Mapping[str, Any] = TOWER, **text: Any
) -> Path:
    """Write a tiny random Qwen3-VL in float32, with sharp logits and no zeros and ones: mix-ups show."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    write_vision_model(folder)
    ids = {
        name: Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
        for name, token in {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }.items()
    }
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": size, **text}, vision_config=dict(tower), tie_word_embeddings=tied, **ids
    )
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(folder)
    return folder


def prompt_with_images(vision: VisionModel, pictures: Sequence[Image.Image]) -> tuple[list[int], PromptMedia]:
    """Return a prompt with images between text."""
    images = [normalise_image(encoded(one), vision.rule) for one in pictures]
    short = [5, 6]
    for number in range(len(images)):
        short += [vision.tokens.token, 40 + number]
    tokens = expand(short, [one.size.grid for one in images], vision.tokens).tolist()
    return tokens, PromptMedia.of(images)


def without_images(answer: list[int], vision: VisionModel) -> list[int]:
    """Return an answer up to its first image token: transformers can't compute what follows one."""
    return answer[: answer.index(vision.tokens.token)] if vision.tokens.token in answer else answer


def image_logprobs(
    model: Any, prompt: Sequence[int], answer: Sequence[int], pictures: Sequence[Image.Image]
) -> "torch.Tensor":
    """Return log-probs of an answer by transformers' own processor and forward pass, without cache or padding."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    seen = Qwen2VLImageProcessorPil(patch_size=16, size=PROCESSOR["size"])(list(pictures), return_tensors="pt")
    ids = torch.tensor([[*prompt, *answer]])
    modality = torch.nn.functional.pad((ids[:, : len(prompt)] == model.config.image_token_id).long(), (0, len(answer)))
    inputs = {name: value.to(model.device) for name, value in {**seen, "mm_token_type_ids": modality}.items()}
    with torch.no_grad():
        logits = model(ids.to(model.device), **inputs).logits[0, len(prompt) - 1 : -1].cpu()
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
