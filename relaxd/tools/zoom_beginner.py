"""Makes the tiny model of examples/zoom.toml: a Qwen3-VL that zooms into a random half, and reads the shown digit.

`python -m relaxd.tools.zoom_beginner FOLDER` trains it on conversations whose call doesn't depend on the picture. It
runs as a separate process, so that the command line needs no torch.
"""

import json
import sys
from pathlib import Path
from random import Random

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

from relaxd.data.examples import Message
from relaxd.data.vision import VisionModel, read_vision
from relaxd.envs.environment import ToolCall
from relaxd.envs.function_tools import FunctionTool
from relaxd.envs.replies import ParsedReply
from relaxd.envs.zoom import Zoom
from relaxd.media.media_tokens import Grid, expand
from relaxd.tools.digit_pictures import DIGITS, SIDE, draw
from relaxd.tools.sight_beginner import IMAGE_MARKS, PATCH, processor, random_model
from relaxd.tools.tool_beginner import CHAT_TEMPLATE, lesson_loss, tokenizer_of, train
from relaxd.tools.zoom_pictures import HALVES, PROMPT, SHOWN, draw_wide

IMAGE = IMAGE_MARKS["image_token_id"]
SEEING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content or '' }}",
    """
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'image' -%}<|image|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}""",
)
"""Template of `tool_beginner` with support for message parts: an image becomes a token."""
SMALLEST = SHOWN[0] * SHOWN[1]
UPDATES = 600
BATCH = 16
LEARNING_RATE = 3e-3


def make(folder: Path, updates: int = UPDATES) -> None:
    """Make the model and write it with its tokenizer, chat template and image processor into `folder`."""
    lessons = Lessons()
    model = random_model(folder, lessons.tokenizer, IMAGE_MARKS, SIDE, times=1)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor(1, SMALLEST, SIDE * SIDE)))
    _teach(model, lessons, read_vision(folder), updates)
    model.save_pretrained(folder)


class Lessons:
    """Random conversations about pictures that no run draws."""

    def __init__(self) -> None:
        self._random = Random(0)
        self._tools = [FunctionTool(Zoom().zoom).schema]
        self.tokenizer: PreTrainedTokenizerFast = tokenizer_of([PROMPT])
        """A tokenizer with one token for each phrase of the lessons, each number and an image."""
        self.tokenizer.chat_template = SEEING_TEMPLATE
        said = [self._text(look, 0).replace(IMAGE, "") for look in HALVES * 50]
        self.tokenizer = tokenizer_of([*said, *map(str, range(DIGITS)), PROMPT.removeprefix("<image>")])
        self.tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
        self.tokenizer.chat_template = SEEING_TEMPLATE

    def lesson(self) -> tuple[str, list[np.ndarray]]:
        """Return a conversation about a picture, and the pixels that the prompt and the tool show.

        The call zooms into a random half, but the tool always shows a digit: the model learns to read, not to choose.
        """
        seed = -1 - self._random.randrange(1 << 20)
        digit, shown = draw(seed)
        _, _, picture = draw_wide(seed - 1)
        look = self._random.choice(HALVES)
        return self._text(look, digit), [np.asarray(picture.resize(SHOWN)), np.asarray(shown)]

    def _text(self, look: tuple[int, ...], answer: int) -> str:
        image, question = {"type": "image"}, {"type": "text", "text": PROMPT.removeprefix("<image>")}
        call = ToolCall("zoom", {"box": list(look)})
        messages: list[Message] = [
            {"role": "user", "content": [image, question]},
            ParsedReply(calls=(call,)).message,
            {"role": "tool", "content": [image]},
            {"role": "assistant", "content": str(answer)},
        ]
        return str(self.tokenizer.apply_chat_template(messages, tools=self._tools, tokenize=False))


def _teach(model: Qwen3VLForConditionalGeneration, lessons: Lessons, vision: VisionModel, updates: int) -> None:
    """Teach the model the assistant's messages of the lessons."""
    grids: list[Grid] = [(1, height // PATCH, width // PATCH) for width, height in (SHOWN, (SIDE, SIDE))]

    def loss(done: int) -> torch.Tensor:
        texts, pictures = zip(*(lessons.lesson() for _ in range(BATCH)), strict=True)
        rows = [expand(lessons.tokenizer.encode(text), grids, vision.tokens) for text in texts]
        ids = torch.from_numpy(np.stack(rows)).long()
        patches = [
            vision.patches(pixels, grid) for shown in pictures for pixels, grid in zip(shown, grids, strict=True)
        ]
        logits = model(
            input_ids=ids,
            pixel_values=torch.from_numpy(np.concatenate(patches)),
            image_grid_thw=torch.tensor(grids * len(texts)),
            mm_token_type_ids=(ids == vision.tokens.token).long(),
        ).logits
        return lesson_loss(logits, ids)

    train(model, updates, LEARNING_RATE, loss)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
