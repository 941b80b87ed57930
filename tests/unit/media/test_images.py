"""Images from every form and format to their normal form, and what is refused; patches beside those of transformers."""

import base64
import io
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from relaxd.data.vision import CLIP_MEAN, CLIP_STD
from relaxd.media import sources as media_sources
from relaxd.media.images import ImageRule, measure_image, normalise_image, patches
from relaxd.media.kinds import MediaCache
from relaxd.media.prompt_media import contents_of, grids_of, hashes_of, to_columns
from relaxd.media.sources import MediaError
from tests.kit.vision import encoded, picture

RULE = ImageRule(patch=16, merge=2, min_pixels=32 * 32 * 4, max_pixels=32 * 32 * 64)
RED, WHITE, GREY = (255, 0, 0), (255, 255, 255), (128, 128, 128)


def colour(source: Any, rule: ImageRule = RULE) -> tuple[int, ...]:
    """The mean colour of an item's normal form, whose PNG must be RGB."""
    image = Image.open(io.BytesIO(normalise_image(source, rule).content))
    assert image.mode == "RGB"
    return tuple(int(channel) for channel in np.asarray(image).reshape(-1, 3).mean(0).round())


def grey16(value: int) -> Image.Image:
    return Image.fromarray(np.full((64, 64), value, np.uint16))


def palette() -> Image.Image:
    image = Image.new("P", (64, 64), 1)
    image.putpalette([0, 0, 0, *RED])
    return image


def test_every_form_of_an_item_is_the_same_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = encoded(picture(70, 50))
    jpeg = encoded(picture(70, 50), "JPEG")  # whose base64 begins with a slash
    Path("a b.png").write_bytes(content)
    text = base64.b64encode(content).decode()
    forms = (
        "a b.png",
        f"file://{tmp_path}/a%20b.png",
        content,
        bytearray(content),
        {"bytes": content, "path": "elsewhere.png"},
        {"bytes": None, "path": "a b.png"},
        {"path": "a b.png"},
        text,
        f"data:image/png;base64,{text}",
    )
    assert {normalise_image(form, RULE).sha256 for form in forms} == {normalise_image(content, RULE).sha256}
    assert normalise_image(base64.b64encode(jpeg).decode(), RULE) == normalise_image(jpeg, RULE)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (encoded(Image.new("RGB", (64, 64), RED)), RED),
        (encoded(Image.new("RGBA", (64, 64), (255, 0, 0, 0))), WHITE),
        (encoded(Image.new("RGBA", (64, 64), (0, 0, 0, 127))), GREY),
        (encoded(Image.new("LA", (64, 64), (0, 0))), WHITE),
        (encoded(palette()), RED),
        (encoded(palette(), transparency=1), WHITE),
        (encoded(Image.new("RGB", (64, 64), RED), transparency=RED), WHITE),
        (encoded(Image.new("CMYK", (64, 64), (0, 255, 255, 0)), "TIFF"), RED),
        (encoded(grey16(0x8080)), GREY),
        (encoded(Image.new("1", (64, 64), 1)), WHITE),
        (encoded(Image.new("L", (64, 64), 128)), GREY),
        (
            encoded(
                Image.new("RGB", (64, 64), RED),
                "GIF",
                save_all=True,
                append_images=[Image.new("RGB", (64, 64), WHITE)],
            ),
            RED,
        ),
        (encoded(Image.new("RGB", (64, 64), RED), "WEBP", lossless=True), RED),
    ],
    ids=[
        "rgb",
        "clear",
        "half",
        "grey-clear",
        "palette",
        "clear-palette",
        "key",
        "cmyk",
        "16-bit",
        "1-bit",
        "grey",
        "animated",
        "webp",
    ],
)
def test_every_kind_of_pixels_becomes_rgb(content: bytes, expected: tuple[int, ...]) -> None:
    assert colour(content) == expected


def test_images_are_turned_upright_and_sized_so_before_decoding() -> None:
    image = Image.new("RGB", (128, 64), WHITE)
    image.paste(RED, (0, 0, 64, 64))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned right by 90 degrees
    content = encoded(image, exif=exif)
    found = normalise_image(content, RULE)
    assert found.size == measure_image(content, RULE)
    assert (found.size.original, found.size.normal) == ((64, 128), (64, 128))
    pixels = np.asarray(Image.open(io.BytesIO(found.content)))
    assert tuple(pixels[0, 0]) == RED
    assert tuple(pixels[127, 0]) == WHITE


def test_the_hash_is_of_pixels_and_rule() -> None:
    image = picture(96, 64)
    same = normalise_image(encoded(image, compress_level=1), RULE), normalise_image(encoded(image, "TIFF"), RULE)
    assert same[0].sha256 == same[1].sha256
    other = ImageRule(16, 2, RULE.min_pixels, RULE.max_pixels * 2)
    assert normalise_image(encoded(image), other).content == same[0].content
    assert normalise_image(encoded(image), other).sha256 != same[0].sha256
    assert normalise_image(encoded(picture(96, 64, seed=1)), RULE).sha256 != same[0].sha256
    found = {
        normalise_image(encoded(Image.new("RGB", size)), ImageRule(16, 2, 1, 1 << 20)).sha256
        for size in ((64, 32), (32, 64))
    }
    assert len(found) == 2  # equal bytes of pixels in another shape


@pytest.mark.parametrize("patch", [14, 16])
def test_patches_of_the_normal_form_are_those_of_the_file_in_transformers(patch: int) -> None:
    rule = ImageRule(patch, 2, (2 * patch) ** 2 * 4, (2 * patch) ** 2 * 64)
    size = {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=patch, size=size)
    for number, (width, height) in enumerate([(64, 64), (100, 60), (33, 200), (640, 480), (9, 8), (1000, 9)]):
        image = picture(width, height, number)
        found = normalise_image(encoded(image), rule)
        assert smart_resize(height, width, rule.factor, rule.min_pixels, rule.max_pixels) == found.size.normal[::-1]
        ours = processor([Image.open(io.BytesIO(found.content))], do_resize=False, return_tensors="np")
        theirs = processor([image], return_tensors="np")
        assert tuple(theirs["image_grid_thw"][0]) == found.size.grid
        assert len(theirs["pixel_values"]) == 4 * found.size.tokens
        np.testing.assert_array_equal(ours["pixel_values"], theirs["pixel_values"])


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (b"", "is empty"),
        (b"hello", "is no image in a format that is read (PNG, JPEG"),
        (encoded(picture(200, 200), "JPEG")[:-900], "is a broken image: image file is truncated"),
        (encoded(picture(200, 200))[:900], "is a broken image"),
        (bomb(6000, 6000), "is 6000 x 6000 pixels: at most 33,554,432 are decoded"),
        (bomb(60000, 60000), "has more than 33,554,432 pixels"),
        (encoded(Image.new("RGB", (64, 7))), "is 64 x 7 pixels: each side must have at least 8"),
        (encoded(Image.new("L", (1700, 8))), "one side may be at most 200 times the other"),
        (encoded(Image.new("F", (64, 64), 0.5), "TIFF"), "has floating-point pixels"),
        (encoded(Image.new("I", (64, 64), 1 << 20), "TIFF"), "has pixels of more than 16 bits"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image in a format that is read"),
        (7, "is a value of type int: it must be a path"),
        ({"bytes": None}, "is an object without bytes, base64 and path"),
        ("nowhere.png", "is 'nowhere.png', which is no file here"),
        ("x" * 5000, "which can't be read: File name too long"),
        ("a\0b", "which is no file here"),
        (".", "is '.', which is no regular file"),
        ("file://elsewhere/a.png", "is a file:// URI of the host elsewhere"),
        ("https://me:secret@host.org/a.png?key=secret", "is a URL of host.org: relaxd fetches no media"),
        ("s3://key:secret@bucket/a.png", "is a URL of bucket: relaxd fetches no media"),
        ("data:image/png,abc", "is a data URI without base64"),
        ("data:image/png;base64,a?b", "is a data URI whose base64 is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 99 and value.isprintable() else "",
)
def test_what_cannot_be_used_is_refused(source: Any, complaint: str) -> None:
    with pytest.raises(MediaError) as caught:
        normalise_image(source, RULE)
    assert complaint in str(caught.value)
    assert "secret" not in str(caught.value)


def test_files_have_a_limit_and_pipes_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MediaError, match="no regular file"):
        normalise_image(str(tmp_path / "pipe"), RULE)
    content = encoded(picture(64, 64))
    monkeypatch.setattr(media_sources, "MAX_BYTES", len(content) - 1)
    (tmp_path / "a.png").write_bytes(content)
    for source in (content, str(tmp_path / "a.png"), base64.b64encode(content * 2).decode()):
        with pytest.raises(MediaError, match="is larger than"):
            normalise_image(source, RULE)


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
