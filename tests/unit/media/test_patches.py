"""Patches against transformers' image processor, and images on their way from columns to patches."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from relaxd.data.vision import CLIP_MEAN, CLIP_STD
from relaxd.media.images import ImageRule, normalise_image, patches
from relaxd.media.kinds import MediaCache
from relaxd.media.prompt_media import contents_of, grids_of, hashes_of, to_columns
from relaxd.media.sources import MediaError
from tests.kit.vision import encoded, picture

RULE = ImageRule(16, 2, 32 * 32 * 4, 32 * 32 * 64)


@pytest.mark.parametrize(
    ("patch", "times", "mean", "std"),
    [(14, 2, CLIP_MEAN, CLIP_STD), (16, 2, (0.5,) * 3, (0.5,) * 3), (8, 1, (0.1, 0.2, 0.3), (0.3, 0.2, 0.1))],
)
def test_patches_are_transformers_bit_for_bit(
    patch: int, times: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    rule = ImageRule(patch, 2, (2 * patch) ** 2 * 4, (2 * patch) ** 2 * 64)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        temporal_patch_size=times,
        image_mean=list(mean),
        image_std=list(std),
        size={"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels},
    )
    for number, (width, height) in enumerate([(100, 60), (33, 200), (640, 480)]):
        image = picture(width, height, number)
        found = normalise_image(encoded(image), rule)
        pixels = MediaCache(1).load(
            {found.sha256: "image"},
            lambda hashes, png=found.content: dict.fromkeys(hashes, png),  # type: ignore[misc]
        )
        ours = patches(pixels[found.sha256], rule, found.size.grid, mean, std, times)
        theirs = processor([image], return_tensors="np")["pixel_values"]
        assert ours.dtype == theirs.dtype == np.float32
        np.testing.assert_array_equal(ours, theirs)


def test_a_cache_fetches_what_it_lacks_at_once_and_keeps_what_was_used_last() -> None:
    images = {one.sha256: one for one in (normalise_image(encoded(picture(64, 64, n)), RULE) for n in range(3))}
    first, second, third = images
    asked: list[list[str]] = []

    def fetch(hashes: Sequence[str]) -> Mapping[str, bytes]:
        asked.append(list(hashes))
        return {name: images[name].content for name in hashes if name in images}

    cache = MediaCache(2 * 64 * 64 * 3)
    found = cache.load(dict.fromkeys([first, second], "image"), fetch)
    assert asked == [[first, second]]
    assert found[first].shape == (64, 64, 3)
    assert found[first].dtype == np.uint8
    cache.load({first: "image"}, fetch)
    cache.load({third: "image"}, fetch)  # in the place of the second
    cache.load(dict.fromkeys([first, third], "image"), fetch)
    assert asked == [[first, second], [third]]
    cache.load({second: "image"}, fetch)
    assert asked[2:] == [[second]]
    with pytest.raises(MediaError, match="image abc isn't there any more"):
        cache.load({"abc": "image"}, fetch)


def test_columns_have_each_image_once() -> None:
    one, other = (normalise_image(encoded(picture(*size)), RULE) for size in ((64, 64), (100, 60)))
    records, contents = to_columns([one, other, one])
    assert hashes_of(records) == (one.sha256, other.sha256, one.sha256)
    assert grids_of(records) == [one.size.grid, other.size.grid, one.size.grid]
    assert contents.dtype == np.uint8
    assert contents.size == len(one.content) + len(other.content)
    assert contents_of(records, contents) == {one.sha256: one.content, other.sha256: other.content}
    assert contents_of(*to_columns([])) == {}
    with pytest.raises(MediaError, match="bytes of media, but prompt_media says"):
        contents_of(records, contents[1:])
