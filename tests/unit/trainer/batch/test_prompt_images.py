"""Images of groups: columns that are checked, read and packed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.algorithms import create
from relaxd.board import MEDIA_CONTENTS, PROMPT_MEDIA
from relaxd.config import GRPOConfig
from relaxd.data.vision import VisionModel, read_vision
from relaxd.media import expand, normalise_image
from relaxd.media.prompt_media import to_columns
from services.trainer.batch.groups import MalformedGroup, TrainGroup, check_group
from services.trainer.batch.micro_batch import TrainSequence, pack, with_padding
from services.trainer.batch.prompt_images import ImageReader
from tests.kit.vision import encoded, picture, write_vision_model

IMAGES = ((64, 64, 0), (96, 64, 1), (64, 64, 0))
"""Width, height and seed of the images of a prompt: the last one is the first one again."""


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return read_vision(write_vision_model(tmp_path_factory.mktemp("vision")))


def columns_of(vision: VisionModel, images: tuple[tuple[int, int, int], ...] = IMAGES) -> dict[str, Any]:
    normal = [normalise_image(encoded(picture(*size, seed=seed)), vision.rule) for *size, seed in images]
    short = [1, 2, *[vision.tokens.token, 3] * len(images), 4]
    media, contents = to_columns(normal)
    return {
        "prompt_tokens": expand(short, [one.size.grid for one in normal], vision.tokens),
        PROMPT_MEDIA: media,
        MEDIA_CONTENTS: contents,
        "tokens": np.arange(5, 10, dtype=np.int32),
        "sample_of_sequence": np.array([0, 1], np.int32),
        "lengths": np.array([3, 2], np.int32),
        "shares_prompt": np.ones(2, np.uint8),
        "loss_mask": np.ones(5, np.uint8),
        "rollout_logprobs": np.full(5, -1.0, np.float32),
        "versions": np.zeros(5, np.int64),
        "spans_weight_update": np.zeros(2, np.uint8),
        "advantages": np.ones(5, np.float32),
        "reward": np.array([0.0, 1.0]),
    }


def checked(columns: dict[str, Any], vision: VisionModel) -> TrainGroup:
    return check_group("g", columns, columns, images=vision.tokens)


def sequences(group: TrainGroup, vision: VisionModel) -> list[TrainSequence]:
    packed = ("rollout_logprobs", "advantages")
    return group.sequences([0, 1], packed, create(GRPOConfig()), 1.0, 0, images=ImageReader(vision.tokens))


def test_a_group_is_packed_with_each_image_once(vision: VisionModel) -> None:
    columns = columns_of(vision)
    row = pack(sequences(checked(columns, vision), vision))
    assert row.images is not None
    assert [image.pixels.shape for image in row.images.images] == [(64, 64, 3), (64, 96, 3)]
    places = np.flatnonzero(columns["prompt_tokens"] == vision.tokens.token)
    np.testing.assert_array_equal(row.images.places, places)
    assert row.images.rows.tolist() == [*range(4), *range(4, 10), *range(4)]
    assert row.positions.dtype == np.float32
    # Behind three images, of 2, 3 and 2 tokens' width, one token each, and the prompt's last one.
    after = 2 + 2 + 1 + 3 + 1 + 2 + 1 + 1
    tokens = len(columns["prompt_tokens"])
    np.testing.assert_array_equal(
        row.positions[:, tokens : tokens + 5], [[*range(after, after + 3), after, after + 1]] * 3
    )
    padded = with_padding(row, 16)
    assert padded.positions.shape == (3, len(padded.tokens))
    assert padded.images is row.images


def test_prompts_with_other_images_are_not_shared(vision: VisionModel) -> None:
    one, other = (sequences(checked(columns_of(vision, ((64, 64, seed),)), vision), vision) for seed in (0, 1))
    row = pack([*one, *other])
    assert row.prefixes[:, 1].tolist() == [0, len(one[0].tokens) - 3, 0, len(one[0].tokens) - 3]
    assert row.images is not None
    assert len(row.images.images) == 2
    assert len(pack([*one, *one]).tokens) < len(row.tokens)


def test_rows_of_text_are_packed_as_before(vision: VisionModel) -> None:
    text = sequences(checked(columns_of(vision, ()), vision), vision)
    row = pack(text)
    assert row.images is None
    assert (row.positions.dtype, row.positions.tolist()) == (np.int64, [0, 1, 2, 3, 4, 5, 3, 4])
    images = sequences(checked(columns_of(vision), vision), vision)
    both = pack([*text, *images])
    np.testing.assert_array_equal(both.positions[:, :8], np.tile(row.positions, (3, 1)))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({MEDIA_CONTENTS: np.zeros(7, np.uint8)}, "has 7 bytes of media, but prompt_media says"),
        ({MEDIA_CONTENTS: np.zeros(7, np.int32)}, "media_contents must be an array .* of uint8"),
        ({PROMPT_MEDIA: [{"kind": "image"}]}, "prompt_media is malformed: KeyError"),
        ({PROMPT_MEDIA: 5}, "prompt_media is malformed: TypeError"),
        ({"prompt_tokens": np.arange(9, dtype=np.int32)}, "has 0 tokens of images and video, but its items have 14"),
        ({"shares_prompt": np.array([1, 0], np.uint8), "loss_mask": np.array([1, 1, 1, 0, 1], np.uint8)}, "sequence 1"),
    ],
)
def test_malformed_images_are_refused(vision: VisionModel, changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(MalformedGroup, match=wrong):
        checked(columns_of(vision) | changes, vision)


def test_an_image_without_content_is_refused(vision: VisionModel) -> None:
    columns = columns_of(vision, ((64, 64, 0),))
    columns[PROMPT_MEDIA][0]["bytes"] = 0
    columns[MEDIA_CONTENTS] = np.zeros(0, np.uint8)
    with pytest.raises(MalformedGroup, match="media_contents has no image"):
        checked(columns, vision)


def test_a_step_file_keeps_what_a_replay_needs(vision: VisionModel, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    from services.trainer.batch.step_file import read_step_file, write_step_file
    from tests.unit.trainer.batch.test_trainer_step_file import PLAN

    columns = columns_of(vision)
    write_step_file(tmp_path / "step", PLAN, dict.fromkeys(PLAN.groups, columns))
    assert load_file(tmp_path / "step")
    found = read_step_file(tmp_path / "step").groups[next(iter(PLAN.groups))]
    ours, theirs = (pack(sequences(checked(one, vision), vision)) for one in (columns, found))
    assert ours.images is not None
    assert theirs.images is not None
    for one, other in zip(ours.images.images, theirs.images.images, strict=True):
        assert one.sha256 == other.sha256
        np.testing.assert_array_equal(one.pixels, other.pixels)
