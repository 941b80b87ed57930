"""Makes the tiny models of examples/digits.toml, dots.toml, pitches.toml and zoom.toml.

For digits and dots: a Qwen3-VL that answers any picture or video with any of the task's answers. For pitches: a
Qwen3-Omni that answers any sound with any number. Only their output layer is trained: to give each answer with equal
probability, and to end. Everything else is random, including the towers. For zoom: a Qwen3-VL that zooms into a random
half of a picture, and reads the shown digit; it is trained on conversations whose call doesn't depend on the picture.

`python -m relaxd.tools.media_beginner TASK FOLDER` makes a model. It runs as a separate process, so that the command
line needs no torch.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from relaxd.config import DataConfig
from relaxd.data.examples import Example, Message
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.towers import spectrogram
from relaxd.data.vision import VisionModel, normalise, read_vision
from relaxd.envs.environment import ToolCall
from relaxd.envs.function_tools import FunctionTool
from relaxd.envs.replies import ParsedReply
from relaxd.envs.zoom import Zoom
from relaxd.media.images import decode_png
from relaxd.media.kinds import NormalMedia
from relaxd.media.media_tokens import Grid, expand
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO, MediaItem
from relaxd.media.sounds import decode_wav
from relaxd.tools import digit_pictures, moving_dots, tone_pitches, zoom_pictures
from relaxd.tools.text_beginner import CHAT_TEMPLATE as TOOL_TEMPLATE
from relaxd.tools.text_beginner import END, labels, lesson_loss, save, tokenizer_of, train

IMAGE_MARKS = {"image_token_id": "<|image|>"}
VIDEO_MARKS = {"video_token_id": "<|video|>", "vision_start_token_id": "<|start|>", "vision_end_token_id": "<|stop|>"}
"""Special tokens that stand for media in a model's texts, by the token's name in config.json."""
MARKS: Mapping[str, dict[str, str]] = {
    IMAGE: IMAGE_MARKS,
    VIDEO: IMAGE_MARKS | VIDEO_MARKS,
    AUDIO: IMAGE_MARKS | {"audio_token_id": "<|audio|>"},
}
"""For each kind of media: the special tokens of its model, by the token's name in config.json."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<|{{ part.type }}|>{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}
"""
PATCH, MERGE = 8, 2
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
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
UPDATES = 200
LEARNING_RATE = 1e-2
ITEMS = 8
"""Number of pictures, videos or sounds on which the output layer is trained."""


@dataclass(frozen=True)
class Task:
    """A task: a question about a picture, video or sound, and its possible answers."""

    kind: str
    """Kind of media of the task: image, video or audio."""
    question: str
    answers: Sequence[str]
    item: Callable[[int], Any]
    """Function that draws a picture, video or sound from a seed, in the form of a data row. Runs use no negative
    seeds."""
    side: int
    """Width and height of a picture or frame, in pixels."""
    frames: int = 1
    """Number of frames per video; 1 for other media."""

    @property
    def times(self) -> int:
        """Number of frames that a patch of the vision tower covers."""
        return min(self.frames, 2)

    @property
    def marks(self) -> dict[str, str]:
        """Special tokens for media of the task's model, by the token's name in config.json."""
        return MARKS[self.kind]


DIGITS = Task(
    IMAGE,
    digit_pictures.PROMPT.removeprefix("<image>"),
    list(map(str, range(digit_pictures.DIGITS))),
    lambda seed: digit_pictures.encoded(digit_pictures.draw(seed)[1]),
    digit_pictures.SIDE,
)
DOTS = Task(
    VIDEO,
    moving_dots.PROMPT.removeprefix("<video>"),
    list(moving_dots.SIDES),
    lambda seed: [digit_pictures.encoded(frame) for frame in moving_dots.draw(seed)[1]],
    moving_dots.SIDE,
    moving_dots.FRAMES,
)


def make(folder: Path, task: Task, updates: int = UPDATES) -> None:
    """Create and train a task's model, and write it with tokenizer, chat template and processors into `folder`."""
    model = random_model(folder, tokenizer_of_task(task), task.marks, task.side, task.times)
    area = task.side**2  # limits with which no item is resized, and all frames are taken
    (folder / "preprocessor_config.json").write_text(json.dumps(processor(task.times, area, area)))
    if task.kind == VIDEO:
        area *= task.frames
        (folder / "video_preprocessor_config.json").write_text(json.dumps(processor(task.times, area, area)))
    teach(model.lm_head, folder, task, updates, lambda ids, *given: _hidden(model, ids, *given))
    model.save_pretrained(folder)


def random_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, marks: Mapping[str, str], side: int, times: int
) -> Qwen3VLForConditionalGeneration:
    """Create a Qwen3-VL with random weights, and write it with its tokenizer into `folder`.

    Args:
        folder: folder to write; created if missing.
        tokenizer: the model's tokenizer, which has the tokens in `marks`.
        marks: special tokens for media, by the token's name in config.json.
        side: maximum width and height of the model's pictures, in pixels.
        times: number of frames that a patch covers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would only wait for each other
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    tower = {**TOWER, "temporal_patch_size": times, "num_position_embeddings": (side // PATCH) ** 2}
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    )
    save(folder, model, tokenizer)
    return model


def processor(times: int, smallest: int, largest: int) -> dict[str, Any]:
    """Return the settings of an image or video processor.

    `times` is the number of frames per patch; `smallest` and `largest` limit an image's or video's number of pixels.
    """
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": times,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": smallest, "longest_edge": largest},
    }


def tokenizer_of_task(task: Task) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each answer, one for the question, and the special tokens for media."""
    words = [answer for answer in task.answers if not answer.isdigit()]  # digits are tokens anyway
    times = ["< seconds>"] if task.kind == VIDEO else []
    tokenizer = tokenizer_of([task.question, *words, *times] * 10)
    tokenizer.add_special_tokens({"additional_special_tokens": list(task.marks.values())})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def teach(
    head: torch.nn.Module,
    folder: Path,
    task: Task,
    updates: int,
    states_of: Callable[[torch.Tensor, VisionModel, NormalMedia], torch.Tensor],
) -> None:
    """Train a model's output layer to give every possible answer of a task with equal probability.

    Each of several pictures, videos or sounds, which no run uses, is paired with every answer.

    Args:
        head: the output layer.
        folder: the model's folder.
        task: the task.
        updates: number of optimizer updates.
        states_of: returns the hidden states for token ids [answers, T]: a prompt with one item and each of its answers.
    """
    vision = read_vision(folder, DataConfig(source="addition", media_keys={task.kind: "items"}))
    tokenizer = PromptTokenizer(folder, vision=vision)
    ids, hidden = [], []
    for number in range(ITEMS):
        question = [{"type": task.kind}, {"type": "text", "text": task.question}]
        item = MediaItem(task.kind, task.item(-1 - number), "lesson")
        example = Example([{"role": "user", "content": question}], media=(item,))
        (found,) = normalise(example, vision)
        prompt = tokenizer.encode_seen(example, [found])
        texts = [tokenizer.encode_text(f"{answer}{END}") for answer in task.answers]
        ids.append(torch.from_numpy(np.stack([[*prompt, *text] for text in texts])).long())
        with torch.no_grad():
            hidden.append(states_of(ids[-1], vision, found))
    states, answers = torch.cat(hidden)[:, :-1], labels(torch.cat(ids))[:, 1:].flatten()
    optimizer = torch.optim.Adam(head.parameters(), lr=LEARNING_RATE)
    for _ in range(updates):
        loss = torch.nn.functional.cross_entropy(head(states).flatten(0, 1), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _hidden(
    model: Qwen3VLForConditionalGeneration, ids: torch.Tensor, vision: VisionModel, item: NormalMedia
) -> torch.Tensor:
    """Return a model's hidden states [answers, T, hidden] for token ids [answers, T].

    Each row is the same prompt with one image or video (`item`), followed by one of its answers.
    """
    grid = item.size.grid
    patches = torch.tensor(vision.patches(decode_png(item.content), grid)).repeat(len(ids), 1)
    grids = torch.tensor([grid] * len(ids))
    is_video = (ids == vision.tokens.video).long()
    own = (
        {"pixel_values_videos": patches, "video_grid_thw": grids}
        if is_video.any()
        else {"pixel_values": patches, "image_grid_thw": grids}
    )
    modality = (ids == vision.tokens.token).long() + 2 * is_video
    states: torch.Tensor = model.model(input_ids=ids, mm_token_type_ids=modality, **own).last_hidden_state
    return states


PITCHES = Task(
    AUDIO,
    tone_pitches.PROMPT.removeprefix("<audio>"),
    list(map(str, range(tone_pitches.PITCHES))),
    lambda seed: tone_pitches.encoded(tone_pitches.draw(seed)[1]),
    PATCH,
)
BANDS = 32
"""Number of mel bands of the spectrogram that the model hears."""
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128, "norm_topk_prob": False}
EARS = {
    "num_mel_bins": BANDS,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "output_dim": 64,
    "downsample_hidden_size": 16,
    "max_source_positions": 100,
}


def make_hearing(folder: Path, task: Task, updates: int = UPDATES) -> None:
    """Create and train the model of a task with sounds, and write it with tokenizer and processors into `folder`."""
    model = _random_hearing_model(folder, tokenizer_of_task(task), task)
    teach(model.thinker.lm_head, folder, task, updates, lambda ids, *given: _heard_states(model.thinker, ids, *given))
    model.save_pretrained(folder)


def _random_hearing_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, task: Task
) -> Qwen3OmniMoeForConditionalGeneration:
    """Create a Qwen3-Omni with random weights and no talker, and write it with tokenizer and processors into
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would only wait for each other
    thinker: dict[str, Any] = {
        "text_config": {**TEXT, **EXPERTS, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1},
        "vision_config": {**TOWER, "num_position_embeddings": 1},
        "audio_config": EARS,
        "tie_word_embeddings": False,
        **{name: tokenizer.convert_tokens_to_ids(mark) for name, mark in task.marks.items()},
    }
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False))
    for module in model.thinker.model.audio_tower.modules():
        # With transformers' small initial weights, the frames' positions would hide the sound itself.
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.reset_parameters()
    save(folder, model, tokenizer)
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": BANDS,
        "sampling_rate": tone_pitches.RATE,
        "hop_length": tone_pitches.RATE // 100,
        "n_fft": tone_pitches.RATE // 40,
    }
    area = (task.side * MERGE) ** 2
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor(2, area, area), **extractor}))
    return model


def _heard_states(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration, ids: torch.Tensor, vision: VisionModel, item: NormalMedia
) -> torch.Tensor:
    """Return a model's hidden states [answers, T, hidden] for token ids [answers, T].

    Each row is the same prompt with one sound (`item`), followed by one of its answers.
    """
    assert vision.sound is not None
    features = spectrogram(decode_wav(item.content), vision.sound).repeat(len(ids), 1, 1)
    heard = {"input_features": features, "feature_attention_mask": torch.ones_like(features[:, 0], dtype=torch.long)}
    positions = torch.arange(ids.shape[1]).expand(3, *ids.shape)  # a sound has those of text
    states: torch.Tensor = thinker.model(ids, position_ids=positions, **heard).last_hidden_state
    return states


IMAGE_MARK = IMAGE_MARKS["image_token_id"]
SEEING_TEMPLATE = TOOL_TEMPLATE.replace(
    "{{ message.content or '' }}",
    """
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'image' -%}<|image|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}""",
)
"""Chat template of `text_beginner` that also accepts messages with parts; an image becomes a special token."""
SMALLEST = zoom_pictures.SHOWN[0] * zoom_pictures.SHOWN[1]
ZOOM_UPDATES = 600
BATCH = 16
ZOOM_LEARNING_RATE = 3e-3


def make_zooming(folder: Path, updates: int = ZOOM_UPDATES) -> None:
    """Create and train the model that calls the tool zoom, and write it with tokenizer, chat template and image
    processor into `folder`."""
    lessons = Lessons()
    model = random_model(folder, lessons.tokenizer, IMAGE_MARKS, digit_pictures.SIDE, times=1)
    area = digit_pictures.SIDE**2
    (folder / "preprocessor_config.json").write_text(json.dumps(processor(1, SMALLEST, area)))
    _teach_zoom(model, lessons, read_vision(folder), updates)
    model.save_pretrained(folder)


class Lessons:
    """Generates the conversations on which the zooming model is trained, about random pictures that no run uses."""

    def __init__(self) -> None:
        self._random = Random(0)
        self._tools = [FunctionTool(Zoom().zoom).schema]
        self.tokenizer: PreTrainedTokenizerFast = tokenizer_of([zoom_pictures.PROMPT])
        """Tokenizer with one token for each phrase of the conversations, one for each number, and one for images."""
        self.tokenizer.chat_template = SEEING_TEMPLATE
        said = [self._text(look, 0).replace(IMAGE_MARK, "") for look in zoom_pictures.HALVES * 50]
        self.tokenizer = tokenizer_of(
            [*said, *map(str, range(digit_pictures.DIGITS)), zoom_pictures.PROMPT.removeprefix("<image>")]
        )
        self.tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_MARK]})
        self.tokenizer.chat_template = SEEING_TEMPLATE

    def lesson(self) -> tuple[str, list[np.ndarray]]:
        """Return a random conversation as text, and the pixels of its two pictures: the prompt's and the tool's.

        The model's call zooms into a random half, but the tool always shows a digit: the model learns to read, not to
        choose.
        """
        seed = -1 - self._random.randrange(1 << 20)
        digit, shown = digit_pictures.draw(seed)
        _, _, picture = zoom_pictures.draw_wide(seed - 1)
        look = self._random.choice(zoom_pictures.HALVES)
        return self._text(look, digit), [np.asarray(picture.resize(zoom_pictures.SHOWN)), np.asarray(shown)]

    def _text(self, look: tuple[int, ...], answer: int) -> str:
        image, question = {"type": "image"}, {"type": "text", "text": zoom_pictures.PROMPT.removeprefix("<image>")}
        call = ToolCall("zoom", {"box": list(look)})
        messages: list[Message] = [
            {"role": "user", "content": [image, question]},
            ParsedReply(calls=(call,)).message,
            {"role": "tool", "content": [image]},
            {"role": "assistant", "content": str(answer)},
        ]
        return str(self.tokenizer.apply_chat_template(messages, tools=self._tools, tokenize=False))


def _teach_zoom(model: Qwen3VLForConditionalGeneration, lessons: Lessons, vision: VisionModel, updates: int) -> None:
    """Train the model on the assistant's messages in random conversations (`lessons`)."""
    grids: list[Grid] = [
        (1, height // PATCH, width // PATCH)
        for width, height in (zoom_pictures.SHOWN, (digit_pictures.SIDE, digit_pictures.SIDE))
    ]

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

    train(model, updates, ZOOM_LEARNING_RATE, loss)


if __name__ == "__main__":
    match sys.argv[1]:
        case "pitches":
            make_hearing(Path(sys.argv[2]), PITCHES)
        case "zoom":
            make_zooming(Path(sys.argv[2]))
        case task:
            make(Path(sys.argv[2]), {"digits": DIGITS, "dots": DOTS}[task])
