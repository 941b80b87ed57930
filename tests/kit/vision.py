"""A folder of a model that sees images, with all but its weights, and pictures to look at."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from tests.kit.tokenizer import write_tokenizer

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
