"""Images of groups: columns that are checked, read and packed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.algorithms import create
from relaxd.board import MEDIA_CONTENTS, PROMPT_MEDIA, SEQUENCE_CONTENTS, SEQUENCE_MEDIA
from relaxd.config import GRPOConfig
from relaxd.data.vision import VisionModel, read_vision
from relaxd.media.images import normalise_image
from relaxd.media.media_tokens import expand, lay_out
from relaxd.media.prompt_media import (
    PromptMedia,
    StoredMedia,
    grids_of,
    times_of,
    to_columns,
    to_sequence_columns,
)
from services.trainer.batch.groups import MalformedGroup, TrainGroup, check_group
from services.trainer.batch.micro_batch import TrainSequence, pack, with_padding
from services.trainer.batch.sequence_media import GroupMediaReader
from tests.kit.sounds import sound, write_omni_model
from tests.kit.vision import SoundClip, clip, encoded, picture, prompt_with_media, write_vision_model

IMAGES = ((64, 64, 0), (96, 64, 1), (64, 64, 0))
"""Width, height and seed of the images of a prompt: the last one is the first one again."""


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return read_vision(write_vision_model(tmp_path_factory.mktemp("vision")))


def columns_of(vision: VisionModel, media: tuple[tuple[int, int, int], ...] = IMAGES) -> dict[str, Any]:
    normal = [normalise_image(encoded(picture(*size, seed=seed)), vision.rule) for *size, seed in media]
    short = [1, 2, *[vision.tokens.token, 3] * len(media), 4]
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


def conversation_columns(vision: VisionModel) -> dict[str, Any]:
    """A group whose first sequence goes on with an image of its own, and whose second one has a prompt of its own."""
    columns = columns_of(vision, IMAGES[:1])
    token, (prompt,) = vision.tokens.token, PromptMedia.of_columns(columns).items()
    shown = StoredMedia.of(normalise_image(encoded(picture(96, 64, seed=5)), vision.rule))
    first = [21, token, 22, *[token] * 6, 23]  # the model wrote the first image token
    second = [31, *[token] * 4, 32, *[token] * 6, 33, 34]
    placed = [[replace(shown, begin=3)], [replace(prompt, begin=1), replace(shown, begin=6)]]
    media, contents = to_sequence_columns(placed, [prompt.sha256])
    tokens = np.array([*first, *second], np.int32)
    mask = np.array([1, 1, 1, *[0] * 6, 1, *[0] * 12, 1, 1], np.uint8)
    return columns | {
        "tokens": tokens,
        "lengths": np.array([len(first), len(second)], np.int32),
        "shares_prompt": np.array([1, 0], np.uint8),
        "loss_mask": mask,
        "rollout_logprobs": np.full(len(tokens), -1.0, np.float32),
        "versions": np.zeros(len(tokens), np.int64),
        "advantages": np.ones(len(tokens), np.float32),
        SEQUENCE_MEDIA: media,
        SEQUENCE_CONTENTS: contents,
    }


def checked(columns: dict[str, Any], vision: VisionModel) -> TrainGroup:
    return check_group("g", columns, columns, media=vision.tokens)


def sequences(group: TrainGroup, vision: VisionModel) -> list[TrainSequence]:
    packed = ("rollout_logprobs", "advantages")
    return group.sequences([0, 1], packed, create(GRPOConfig()), 1.0, 0, media=GroupMediaReader(vision.tokens))


def test_a_group_is_packed_with_each_image_once(vision: VisionModel) -> None:
    columns = columns_of(vision)
    row = pack(sequences(checked(columns, vision), vision))
    assert row.media is not None
    assert [item.values.shape for item in row.media.items] == [(64, 64, 3), (64, 96, 3)]
    places = np.flatnonzero(columns["prompt_tokens"] == vision.tokens.token)
    np.testing.assert_array_equal(row.media.places, places)
    assert row.media.rows.tolist() == [*range(4), *range(4, 10), *range(4)]
    assert row.positions.dtype == np.float32
    # Behind three images, of 2, 3 and 2 tokens' width, one token each, and the prompt's last one.
    after = 2 + 2 + 1 + 3 + 1 + 2 + 1 + 1
    tokens = len(columns["prompt_tokens"])
    np.testing.assert_array_equal(
        row.positions[:, tokens : tokens + 5], [[*range(after, after + 3), after, after + 1]] * 3
    )
    padded = with_padding(row, 16)
    assert padded.positions.shape == (3, len(padded.tokens))
    assert padded.media is row.media


def test_images_of_conversations_are_packed_where_they_are(vision: VisionModel) -> None:
    columns = conversation_columns(vision)
    assert [one["bytes"] > 0 for own in columns[SEQUENCE_MEDIA] for one in own] == [True, False, False]
    group = checked(columns, vision)
    row = pack(sequences(group, vision))
    assert row.media is not None
    assert [item.values.shape for item in row.media.items] == [(64, 64, 3), (64, 96, 3)]
    prompt, first = len(columns["prompt_tokens"]), int(columns["lengths"][0])
    second = prompt + first
    begins = (2, prompt + 3, second + 1, second + 6)
    expected = [at + n for at, count in zip(begins, (4, 6, 4, 6), strict=True) for n in range(count)]
    assert row.media.places.tolist() == expected
    assert row.media.rows.tolist() == [*range(10), *range(10)]
    # The first sequence alone, as one long prompt: a sampled image token has the position of a text's.
    whole = np.concatenate([columns["prompt_tokens"], columns["tokens"][:first]])
    grids, places = [(1, 4, 4), (1, 4, 6)], [2, prompt + 3]
    laid_out = lay_out(whole, grids, vision.tokens, begins=places)
    np.testing.assert_array_equal(row.positions[:, : len(whole)], laid_out.positions)

    # Samples that go on with different images share a prompt, which has the same one.
    again = conversation_columns(vision)
    again[SEQUENCE_MEDIA][0] = []
    again["tokens"][3:9] = 7
    again["loss_mask"][3:9] = 1
    (one, _), (other, _) = (sequences(checked(of, vision), vision) for of in (columns, again | shifted(again)))
    assert pack([one, other]).prefixes[:, 1].tolist() == [0, prompt]


def test_a_videos_own_sound_has_a_tower_of_its_own(tmp_path: Path) -> None:
    vision = read_vision(write_omni_model(tmp_path))
    items = [picture(64, 64), SoundClip(clip(4, 64, 64), sound(1.5)), SoundClip(clip(2, 96, 64), sound(0.4, 1))]
    tokens, media = prompt_with_media(vision, items)
    columns = columns_of(vision, ()) | {
        "prompt_tokens": np.array(tokens, np.int32),
        PROMPT_MEDIA: list(media.records),
        MEDIA_CONTENTS: media.array,
    }
    row = pack(sequences(checked(columns, vision), vision))
    assert row.media is not None
    assert [(item.kind, item.grid) for item in row.media.items] == [
        ("image", (1, 4, 4)),
        *[("video", (2, 4, 4)), ("audio", (150,))],
        *[("video", (1, 4, 6)), ("audio", (40,))],
    ]
    np.testing.assert_array_equal(row.media.items[2].values, sound(1.5))
    counts = [vision.tokens.count(item.grid) for item in row.media.items]
    kinds = np.repeat([{"image": 1, "video": 2, "audio": 3}[item.kind] for item in row.media.items], counts)
    layout = lay_out(tokens, grids_of(media.records), vision.tokens, times=times_of(media.records))
    np.testing.assert_array_equal(kinds[row.media.rows], layout.modality[row.media.places])
    for kind in (1, 2, 3):  # the rows of each tower are in order
        own = row.media.rows[layout.modality[row.media.places] == kind]
        assert (np.diff(own) > 0).all()
    # Of the first video the first frames, a second of sound, the second frames, and the rest of the sound.
    first = layout.modality[row.media.places][4:32]
    assert first.tolist() == [2] * 4 + [3] * 13 + [2] * 4 + [3] * 7
    changes: list[tuple[dict[str, Any], str]] = [
        ({"times": []}, r"has a video with the grid \[2, 4, 4, 150\], but 0 times"),
        ({"times": [0.0, float("nan")]}, r"has a video with the times \[0.0, nan\]: they must begin at 0"),
        ({"times": [0.0, float("inf")]}, r"has a video with the times \[0.0, inf\]: they must begin at 0"),
        ({"times": [0.0, -1.0]}, r"has a video with the times \[0.0, -1.0\]: they must begin at 0 and never go back"),
        ({"times": [0.5, 1.0]}, r"has a video with the times \[0.5, 1.0\]: they must begin at 0"),
        *(({"grid": grid}, "must be multiples of the 2 patches") for grid in ([1, 1, 1, 5], [2, 1, 1], [2, 4, 3, 150])),
    ]
    for change, complaint in changes:
        wrong = [record | change if number == 1 else record for number, record in enumerate(media.records)]
        with pytest.raises(MalformedGroup, match=complaint):
            checked(columns | {PROMPT_MEDIA: wrong}, vision)


def shifted(columns: dict[str, Any]) -> dict[str, Any]:
    """Store the image that the first sequence had with the second one."""
    columns[SEQUENCE_MEDIA][1][1]["bytes"] = len(columns[SEQUENCE_CONTENTS])
    return columns


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda own: own[0].append(3), "sequence_media is malformed: TypeError"),
        (lambda own: own[0][0].pop("begin"), "sequence_media is malformed: KeyError"),
        (lambda own: own[0][0].update(begin=1), "sequence 0 has other tokens among those of the item that begins at"),
        (lambda own: own[1][1].update(begin=2), "sequence 1 has an item that begins at token 2, before token 5"),
        (lambda own: own[1][0].update(sha256="x"), "sequence_contents has no item x"),
        (lambda own: own.pop(), "sequence_media must be a list of 2 values"),
    ],
)
def test_malformed_images_of_sequences_are_refused(vision: VisionModel, change: Any, wrong: str) -> None:
    columns = conversation_columns(vision)
    change(columns[SEQUENCE_MEDIA])
    with pytest.raises(MalformedGroup, match=wrong):
        checked(columns, vision)


def test_an_image_is_never_trained_on(vision: VisionModel) -> None:
    columns = conversation_columns(vision)
    columns["loss_mask"][4] = 1
    with pytest.raises(MalformedGroup, match="sequence 0 has loss_mask 1 at a token of media"):
        checked(columns, vision)


def test_prompts_with_other_images_are_not_shared(vision: VisionModel) -> None:
    one, other = (sequences(checked(columns_of(vision, ((64, 64, seed),)), vision), vision) for seed in (0, 1))
    row = pack([*one, *other])
    assert row.prefixes[:, 1].tolist() == [0, len(one[0].tokens) - 3, 0, len(one[0].tokens) - 3]
    assert row.media is not None
    assert len(row.media.items) == 2
    assert len(pack([*one, *one]).tokens) < len(row.tokens)


def test_rows_of_text_are_packed_as_before(vision: VisionModel) -> None:
    text = sequences(checked(columns_of(vision, ()), vision), vision)
    row = pack(text)
    assert row.media is None
    assert (row.positions.dtype, row.positions.tolist()) == (np.int64, [0, 1, 2, 3, 4, 5, 3, 4])
    media = sequences(checked(columns_of(vision), vision), vision)
    both = pack([*text, *media])
    np.testing.assert_array_equal(both.positions[:, :8], np.tile(row.positions, (3, 1)))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({MEDIA_CONTENTS: np.zeros(7, np.uint8)}, "has 7 bytes of media, but prompt_media says"),
        ({MEDIA_CONTENTS: np.zeros(7, np.int32)}, "media_contents must be an array .* of uint8"),
        ({PROMPT_MEDIA: [{"kind": "image"}]}, "prompt_media is malformed: KeyError"),
        ({PROMPT_MEDIA: 5}, "prompt_media is malformed: TypeError"),
        ({"prompt_tokens": np.arange(9, dtype=np.int32)}, "has 0 tokens of media, but its items have 14"),
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
    with pytest.raises(MalformedGroup, match="media_contents has no item"):
        checked(columns, vision)


def test_a_step_file_keeps_what_a_replay_needs(vision: VisionModel, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    from services.trainer.batch.step_plan import read_step_file, write_step_file
    from tests.unit.trainer.batch.step_plans import PLAN

    columns = conversation_columns(vision)
    write_step_file(tmp_path / "step", PLAN, dict.fromkeys(PLAN.groups, columns))
    assert load_file(tmp_path / "step")
    found = read_step_file(tmp_path / "step").groups[next(iter(PLAN.groups))]
    ours, theirs = (pack(sequences(checked(one, vision), vision)) for one in (columns, found))
    assert ours.media is not None
    assert theirs.media is not None
    np.testing.assert_array_equal(ours.positions, theirs.positions)
    for one, other in zip(ours.media.items, theirs.media.items, strict=True):
        assert one.sha256 == other.sha256
        np.testing.assert_array_equal(one.values, other.values)
