"""Expanded ids, modality and positions, against transformers' processors and get_rope_index."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from relaxd.media.images import ImageRule, normalise_image
from relaxd.media.media_tokens import MediaTokens, expand, lay_out
from relaxd.media.sources import MediaError
from tests.kit.vision import encoded, picture, write_vision_model

SIZES: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "one": [(64, 64)],
    "three": [(100, 60), (33, 200), (300, 240)],
    "wide": [(800, 9)],
}
IMAGES = MediaTokens(token=9, merge=2)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, ImageRule]:
    """A processor and a tiny model without weights, and the rule of images."""
    patch = 14 if request.param == "qwen2_5_vl" else 16
    folder = write_vision_model(tmp_path_factory.mktemp("model"), request.param, patch)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rule = ImageRule(patch, 2, (2 * patch) ** 2 * 4, (2 * patch) ** 2 * 64)
    size = {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
    images = Qwen2VLImageProcessorPil(patch_size=patch, size=size)
    old = request.param == "qwen2_5_vl"
    name = transformers.Qwen2_5_VLProcessor if old else transformers.Qwen3VLProcessor
    processor = object.__new__(name)  # its constructor asks for a video processor, which needs torchvision
    processor.image_processor, processor.image_token = images, "<|image_pad|>"
    processor.tokenizer = tokenizer
    token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    text = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 300,
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 1,
        "patch_size": patch,
        "out_hidden_size": 8,
    }
    ids = {"image_token_id": token, "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>")}
    with torch.device("meta"):
        model: Any
        if old:
            model = Qwen2_5_VLModel(transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
        else:
            vision |= {"deepstack_visual_indexes": [0]}
            model = Qwen3VLModel(transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids))
    return processor, model, rule


@pytest.mark.parametrize("name", SIZES)
def test_layouts_are_those_of_transformers(name: str, theirs: tuple[Any, Any, ImageRule]) -> None:
    processor, model, rule = theirs
    pictures = [picture(*size, number) for number, size in enumerate(SIZES[name])]
    content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": "what?"}]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content[1:] + content[:1]}], tokenize=False, add_generation_prompt=True
    )
    short = processor.tokenizer(text)["input_ids"]
    images = MediaTokens(model.config.image_token_id, rule.merge)
    grids = [normalise_image(encoded(one), rule).size.grid for one in pictures]
    found = lay_out(expand(short, grids, images), grids, images)

    seen = processor.image_processor(pictures, return_tensors="pt") if pictures else {}
    pieces = text.split("<|image_pad|>")
    replaced = [processor.replace_image_token(seen, number) for number in range(len(pictures))]
    expanded = pieces[0] + "".join(one + rest for one, rest in zip(replaced, pieces[1:], strict=True))
    ids = torch.tensor([processor.tokenizer(expanded)["input_ids"]])
    modality = (ids == images.token).long()
    positions, delta = model.get_rope_index(
        ids, image_grid_thw=seen.get("image_grid_thw"), mm_token_type_ids=modality, attention_mask=torch.ones_like(ids)
    )
    np.testing.assert_array_equal(found.tokens, ids[0])
    np.testing.assert_array_equal(found.modality, modality[0])
    np.testing.assert_array_equal(found.positions, positions[:, 0])
    assert found.positions.dtype == np.float32
    assert found.next_position == ids.shape[1] + int(delta)


def test_a_prompt_may_end_in_an_image_and_begin_anywhere() -> None:
    grid = (1, 4, 6)
    found = lay_out(expand([1, 9], [grid], IMAGES), [grid], IMAGES, start=10.0)
    assert found.positions.tolist() == [
        [10, 11, 11, 11, 11, 11, 11],
        [10, 11, 11, 11, 12, 12, 12],
        [10, 11, 12, 13, 11, 12, 13],
    ]
    assert found.next_position == 14
    assert lay_out(np.zeros(0), [], IMAGES).next_position == 0


def test_neighbouring_images_keep_their_places() -> None:
    grids = [(1, 2, 2), (1, 2, 4)]
    found = lay_out(expand([9, 9], grids, IMAGES), grids, IMAGES)
    assert found.positions.tolist() == [[0, 1, 1], [0, 1, 1], [0, 1, 2]]


def test_an_image_token_in_an_answer_is_a_token_like_any_other() -> None:
    grids = [(1, 4, 6), (1, 2, 2)]
    tokens = np.array([1, *[9] * 6, 2, 9, 9, 3, 9, 4])
    found = lay_out(tokens, grids, IMAGES, begins=[1, 11])
    assert np.flatnonzero(found.modality).tolist() == [*range(1, 7), 11]
    plain = lay_out(np.where(found.modality == 0, 5, tokens), grids, IMAGES)
    np.testing.assert_array_equal(found.positions, plain.positions)
    assert found.next_position == plain.next_position


@pytest.mark.parametrize(
    ("begins", "complaint"),
    [
        ([0, 4], "has other tokens among those of the item that begins at token 0"),
        ([1, 8], "has other tokens among those of the item that begins at token 8"),
        ([6, 1], "has an item that begins at token 1, before token 10, where the last one ends"),
        ([1, 3], "has an item that begins at token 3, before token 5"),
    ],
)
def test_places_that_are_not_those_of_the_images_are_refused(begins: list[int], complaint: str) -> None:
    with pytest.raises(MediaError, match=complaint):
        lay_out(np.array([1, 9, 9, 9, 9, 2, 9, 9, 9, 9]), [(1, 4, 4)] * 2, IMAGES, begins=begins)


def test_each_further_time_of_a_video_begins_with_the_next_token_of_media() -> None:
    with_video = MediaTokens(9, 2, video=8, start=6, end=7)
    tokens, grids = np.array([1, 6, 8, 7, 3, 6, 8, 7, 9]), [(2, 2, 2), (1, 2, 2)]
    assert lay_out(tokens, grids, with_video).modality.tolist() == [0, 0, 2, 0, 0, 0, 2, 0, 1]
    sampled = np.concatenate([[8, 9], tokens[:-1], [8], tokens[-1:]])  # the model wrote what stands for nothing
    found = lay_out(sampled, grids, with_video, begins=[4, 11])
    assert found.modality.tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 1]
    with pytest.raises(MediaError, match="has 3 begins of items, but it has 2 items"):
        lay_out(tokens, grids, with_video, begins=[2, 6, 8])
    with pytest.raises(MediaError, match="has no tokens for a time of the video that begins at token 6"):
        lay_out(tokens[:-1], grids[:1], with_video, begins=[6])


@pytest.mark.parametrize(
    ("tokens", "grids", "complaint"),
    [
        ([1, 9, 9], [(1, 4, 4)], "has 2 tokens of media, but its items have 4"),
        ([9, 9, 1, 9, 9], [(1, 4, 4)], "has other tokens among those of the item that begins at token 0"),
        ([9, 9], [(1, 2, 2, 8)], "has a video with its own sound, which this model doesn't hear"),
    ],
)
def test_tokens_that_are_not_those_of_the_images_are_refused(tokens: Any, grids: Any, complaint: str) -> None:
    with pytest.raises(MediaError, match=complaint):
        lay_out(np.array(tokens), grids, IMAGES)


@pytest.mark.parametrize(("short", "count"), [([1], 1), ([9, 9], 1)])
def test_there_is_one_image_token_for_each_image(short: list[int], count: int) -> None:
    with pytest.raises(MediaError, match=rf"has {short.count(9)} image tokens \(id 9\) for {count} images"):
        expand(short, [(1, 4, 4)] * count, IMAGES)
