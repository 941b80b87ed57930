"""Data sets with images in the forms of verl, Relax and the hub, read in place, and scored by the rewards for them."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from relaxd.config.load_toml import load_file
from relaxd.data.dataset import load_data
from relaxd.data.vision import read_vision
from relaxd.media.images import normalise_image
from relaxd.media.prompt_media import PromptMedia
from relaxd.rewards import RewardInput, resolve
from tests.kit.vision import encoded, picture, write_vision_model

RUN = """
run.steps = 1
model.path = "model"
reward.name = "dummy"
[data]
source = "files"
max_prompt_tokens = 200
"""
PNG = encoded(picture(100, 60))
URI = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
VERL = {
    "data_source": "hiyouga/geometry3k",
    "prompt": [{"role": "user", "content": "<image>Find x. Think within <think> </think> and \\boxed{}."}],
    "images": [{"bytes": PNG, "path": None}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "48"},
    "extra_info": {"split": "train", "index": 0, "answer": "48", "question": "<image>Find x."},
}
"""A row as verl's examples/data_preprocess/geo3k.py writes it to Parquet."""
SETS: dict[str, tuple[str, dict[str, Any], list[str], str, str, dict[str, float]]] = {
    "verl": (
        "rows.parquet",
        VERL,
        ["answer_key=reward_model.ground_truth", 'media_keys={image = "images"}'],
        "48",
        "geo3k",
        {"<think>so</think> \\boxed{48}": 1.0, "\\boxed{48}": 0.9, "<think>so</think> \\boxed{49}": 0.1},
    ),
    "Relax, paths": (
        "rows.jsonl",
        {"input": "<image>\nHow many?", "label": "<answer>$4$</answer>", "image": ["a.png"]},
        ["prompt_key=input", "answer_key=label", 'media_keys={image = "image"}'],
        "<answer>$4$</answer>",
        "openr1mm",
        {"<think>so</think><answer>4</answer>": 1.0, "<answer>5</answer>": 0.0},
    ),
    "Relax, one item": (
        "rows.parquet",
        {"input": "<image>Which one? A. Cat B. Dog", "label": "<answer>B</answer>", "image": {"bytes": PNG}},
        ["prompt_key=input", "answer_key=label", 'media_keys={image = "image"}'],
        "<answer>B</answer>",
        "multiple_choice",
        {"<think>a dog</think><answer>B</answer>": 1.0, "<answer>A</answer>": 0.0},
    ),
    "parts": (
        "rows.jsonl",
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which one?"}]}]}
        | {"answer": "B", "images": [URI]},
        ['media_keys={image = "images"}'],
        "B",
        "multiple_choice",
        {"The answer is B.": 1.0, "The answer is (C)": 0.0},
    ),
    "OpenAI's parts": (
        "rows.jsonl",
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URI}}]}], "answer": "4"},
        ['media_keys={image = "images"}'],
        "4",
        "openr1mm",
        {"<answer>4</answer>": 1.0, "4": 1.0, "<answer>6</answer>": 0.0},
    ),
}
"""A file, a row, settings of [data], the answer, a reward, and what it gives replies."""


@pytest.mark.parametrize(("file", "row", "settings", "answer", "reward", "replies"), SETS.values(), ids=SETS)
def test_sets_with_images_are_read_in_place_and_scored(
    file: str, row: Any, settings: list[str], answer: str, reward: str, replies: dict[str, float],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    model = write_vision_model(Path("model"))
    Path("a.png").write_bytes(PNG)
    if file.endswith(".parquet"):
        pa.parquet.write_table(pa.Table.from_pylist([row]), file)
    else:
        Path(file).write_text(json.dumps(row))
    Path("run.toml").write_text(RUN)
    prompt = load_data(
        load_file(Path("run.toml"), [f"--data.{one}" for one in [f"path={file}", *settings]])
    ).train.prompt(0)
    vision = read_vision(model)
    assert prompt.media == PromptMedia.of([normalise_image(PNG, vision.rule)])
    assert (prompt.tokens == vision.tokens.token).sum() == 6
    assert prompt.answer == answer
    assert prompt.text.count("<image>") == 1
    score = resolve(reward)
    for reply, expected in replies.items():
        found: Any = score(RewardInput(prompt.text, reply, prompt.answer, prompt.metadata))
        assert (found["reward"] if isinstance(found, dict) else found) == pytest.approx(expected), reply
