"""Makes the tiny model of examples/digits.toml: a Qwen3-VL that answers any picture with any digit.

`python -m relaxd.tools.digits_beginner FOLDER` makes it. Only its output layer is taught: to answer with one of the
digits, all alike, and to end. Everything else is random, the vision tower, too. It runs as a separate process, so that
the command line needs no torch.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from relaxd.data.vision import VisionModel, read_vision
from relaxd.media import expand
from relaxd.tools.digit_pictures import DIGITS, PROMPT, SIDE, draw
from relaxd.tools.tool_beginner import labels, tokenizer_of

IMAGE = "<|image|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|image|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}
"""
PATCH, MERGE = 8, 2
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 1,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
}
"""Settings of an image processor with which a picture has four tokens."""
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
TOWER = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 1,
    "out_hidden_size": 64,
    "num_position_embeddings": (SIDE // PATCH) ** 2,
    "deepstack_visual_indexes": [0],
}
UPDATES = 200
LEARNING_RATE = 1e-2
PICTURES = 8
"""Number of pictures that the output layer is taught with."""


def make(folder: Path, updates: int = UPDATES) -> None:
    """Make the model and write it with its tokenizer, chat template and image processor into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would only wait for each other
    tokenizer = _tokenizer()
    image_token = tokenizer.convert_tokens_to_ids(IMAGE)
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=TOWER, image_token_id=image_token, tie_word_embeddings=False)
    )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    _teach(model, tokenizer, read_vision(folder), updates)
    model.save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each digit, for the question and for an image."""
    tokenizer = tokenizer_of([PROMPT.removeprefix("<image>")] * 10)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _teach(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, vision: VisionModel, updates: int
) -> None:
    """Teach the output layer with pictures that no run draws, each answered with every digit."""
    question = [{"type": "image"}, {"type": "text", "text": PROMPT.removeprefix("<image>")}]
    grid = (1, SIDE // PATCH, SIDE // PATCH)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}, {"role": "assistant", "content": str(digit)}], tokenize=False
        )
        for digit in range(DIGITS)
    ] * PICTURES
    ids = torch.from_numpy(np.stack([expand(tokenizer.encode(text), [grid], vision.tokens) for text in texts])).long()
    pictures = [vision.patches(np.asarray(draw(-1 - number)[1]), grid) for number in range(PICTURES)]
    with torch.no_grad():
        hidden = model.model(
            input_ids=ids,
            pixel_values=torch.from_numpy(np.concatenate([one for one in pictures for _ in range(DIGITS)])),
            image_grid_thw=torch.tensor([grid] * len(ids)),
            mm_token_type_ids=(ids == vision.tokens.token).long(),
        ).last_hidden_state
    optimizer = torch.optim.Adam(model.lm_head.parameters(), lr=LEARNING_RATE)
    answers = labels(ids)[:, 1:].flatten()
    for _ in range(updates):
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[:, :-1]).flatten(0, 1), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
