"""Images of a prompt as engines get them: their places, and positions behind them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relaxd.data.vision import read_vision
from relaxd.media.prompt_media import PromptMedia
from services.rollout.engines.request_types import EngineError, Request, Sampling
from services.rollout.engines.seen_prompts import SeenPrompt, read_model_vision, see
from tests.kit.vision import clip, picture, prompt_with_media, write_vision_model

WIDE, SQUARE, TALL = picture(96, 64), picture(64, 64, 1), picture(64, 128, 2)
"""3 x 2, 2 x 2 and 2 x 4 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("seeing"))


@pytest.mark.parametrize(
    ("pictures", "spans", "behind"),
    [
        ([SQUARE], [(2, 5)], 5),
        ([WIDE, TALL], [(2, 7), (9, 16)], 11),
        ([SQUARE, SQUARE], [(2, 5), (7, 10)], 8),
    ],
)
def test_places_and_positions(
    folder: Path, pictures: list[Image.Image], spans: list[tuple[int, int]], behind: int
) -> None:
    vision = read_vision(folder)
    prompt, media = prompt_with_media(vision, pictures)
    seen = see(Request("a", tuple(prompt), 1, Sampling(4), media=media), vision)
    assert isinstance(seen, SeenPrompt)
    assert [frame.spans for frame in seen.items] == [[span] for span in spans]
    assert {prompt[place] for first, last in spans for place in range(first, last + 1)} == {vision.tokens.token}
    positions = seen.positions(3)
    assert positions.dtype == np.int64
    assert positions.shape == (3, len(prompt) + 3)
    np.testing.assert_array_equal(positions[:, : len(prompt)], seen.layout.positions)
    np.testing.assert_array_equal(positions[:, len(prompt) :], [[behind, behind + 1, behind + 2]] * 3)
    assert seen.offset == behind - len(prompt)
    assert all(seen.patches[name].shape[1:] == (3, 1, 16, 16) for name in seen.hashes)


def test_a_video_of_a_conversation_is_seen_as_one_of_a_prompt(folder: Path) -> None:
    """Its record says where its first frame begins, and the model has written a token of video that stands for none."""
    vision = read_vision(folder)
    prompt, media = prompt_with_media(vision, [clip(4, 64, 64), SQUARE])
    places = np.flatnonzero(np.isin(prompt, list(vision.tokens.modalities))).tolist()
    begins = [places[0], places[-4]]
    records = tuple({**record, "begin": begin + 1} for record, begin in zip(media.records, begins, strict=True))
    in_prompt, shown = (
        see(Request("a", tuple(tokens), 1, Sampling(4), media=own), vision)
        for tokens, own in (
            (prompt, media),
            ([vision.tokens.video, *prompt], PromptMedia(records, media.contents)),
        )
    )
    assert in_prompt is not None
    assert shown is not None
    before = [one.spans[0] for one in in_prompt.items]
    assert [frame.spans for frame in shown.items] == [[(first + 1, last + 1)] for first, last in before]
    np.testing.assert_array_equal(shown.positions(2)[:, 1:], in_prompt.positions(2) + 1)


def test_identity_is_that_of_all_images_in_order(folder: Path) -> None:
    vision = read_vision(folder)
    found = []
    for pictures in ([SQUARE, TALL], [TALL, SQUARE], [SQUARE], [SQUARE, SQUARE], [SQUARE, TALL]):
        prompt, media = prompt_with_media(vision, pictures)
        seen = see(Request("a", tuple(prompt), 1, Sampling(4), media=media), vision)
        assert seen is not None
        found.append(seen.identity)
    assert found[0] == found[-1]
    assert len(set(found)) == 4


def test_models_that_see_nothing(folder: Path, tmp_path: Path) -> None:
    vision = read_model_vision(folder, "sglang")
    assert vision == read_vision(folder)
    prompt, media = prompt_with_media(read_vision(folder), [SQUARE])
    assert see(Request("a", (5, 6), 1, Sampling(4)), vision) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_model_vision(tmp_path, "sglang") is None
    with pytest.raises(EngineError, match="the model takes none"):
        see(Request("a", tuple(prompt), 1, Sampling(4), media=media), None)
