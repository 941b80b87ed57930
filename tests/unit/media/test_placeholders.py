"""Places of images in prompts: content parts, and placeholders with items from a column."""

from typing import Any

import pytest

from relaxd.data.duplicates import keys_of, overlap
from relaxd.data.sources.prompt_columns import Columns
from tests.kit.cases import each

IMAGES = Columns(media={"image": "images"})
IMAGE = {"type": "image"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@each(
    ("row", "prompt", "found"),
    [
        ({"prompt": "<image>What?", "images": ["a"]}, user(IMAGE, text("What?")), [("a", '"images"[0]')]),
        (
            {"prompt": "A <image> b <image>", "images": [{"bytes": b"1"}, b"2"]},
            user(text("A "), IMAGE, text(" b "), IMAGE),
            [({"bytes": b"1"}, '"images"[0]'), (b"2", '"images"[1]')],
        ),
        ({"prompt": "<image>", "images": "a"}, user(IMAGE), [("a", '"images"[0]')]),
        ({"prompt": "<video> a", "images": None}, "<video> a", []),
        ({"prompt": "no column"}, "no column", []),
        (
            {
                "prompt": [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}],
                "images": ["a"],
            },
            [*user(IMAGE, text("a")), {"role": "assistant", "content": "b"}],
            [("a", '"images"[0]')],
        ),
        (
            {"prompt": user({"type": "image", "image": b"1", "text": None}, text("a"))},
            user(IMAGE, text("a")),
            [(b"1", '"prompt"[0].content[0]')],
        ),
        (
            {"prompt": user(text("a"), {"type": "image_url", "image_url": {"url": "data:x", "detail": None}})},
            user(text("a"), IMAGE),
            [("data:x", '"prompt"[0].content[1]')],
        ),
        (
            {"prompt": user(IMAGE, {"type": "image", "image": "b"}, text("<image>")), "images": ["a", "c"]},
            user(IMAGE, IMAGE, IMAGE),
            [("a", '"images"[0]'), ("b", '"prompt"[0].content[1]'), ("c", '"images"[1]')],
        ),
        (
            {"prompt": user({"type": "input_audio", "input_audio": {"data": "abc", "format": "wav"}}, text("a"))},
            user({"type": "audio"}, text("a")),
            [("abc", '"prompt"[0].content[0]')],
        ),
        ({"prompt": user(text("a"), "b")}, [{"role": "user", "content": "ab"}], []),
    ],
)
def test_items_are_found_in_the_order_of_the_prompt(row: Any, prompt: Any, found: Any) -> None:
    example = IMAGES.example(row, "line 1")
    assert example.prompt == prompt
    assert [(item.source, item.place) for item in example.media] == found
    assert example.metadata == {}


def test_placeholders_are_text_without_a_column() -> None:
    assert Columns().example({"prompt": "<image>What?", "images": []}, "").prompt == "<image>What?"


def test_the_text_of_a_prompt_shows_where_images_are() -> None:
    assert IMAGES.example({"prompt": "a <image>b", "images": ["x"]}, "").text == "a <image>b"


def test_prompts_that_differ_in_an_image_are_different_ones() -> None:
    one, same, other = (IMAGES.example({"prompt": "<image>?", "images": [item]}, "") for item in (b"1", b"1", b"2"))
    assert overlap(keys_of([one]), keys_of([same])) == 1
    assert overlap(keys_of([one]), keys_of([other])) == 0


@each(
    ("row", "complaint"),
    [
        (
            {"prompt": "<image><image>", "images": ["a"]},
            '"prompt" has more placeholders of type image than "images" has items (1; rows',
        ),
        ({"prompt": "<image>"}, 'than "images" has items (0; rows without that column have 0)'),
        ({"prompt": "none", "images": ["a"]}, '"images" has 1 items, but the prompt has 0 placeholders <image>'),
        ({"prompt": user({"type": "input_audio", "input_audio": {}})}, "has no item: add it"),
        ({"prompt": user({"type": "file"})}, '"prompt"[0].content[0] is a part of type "file": there are only text'),
        ({"prompt": user(7)}, '"prompt"[0].content[0] is no part: there are only text'),
        (
            {"prompt": user({"type": "image", "max_pixels": 9})},
            "has 'max_pixels', which parts of type image don't have",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "<image>"}], "images": ["a"]},
            '"prompt"[0].content has media in a message of the assistant',
        ),
    ],
)
def test_wrong_places_are_refused(row: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"image|media|part|item") as caught:
        IMAGES.example(row, "line 1")
    assert complaint in str(caught.value)
