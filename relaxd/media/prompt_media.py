"""A prompt's images as they are stored with its group: what they are (column prompt_media), and their bytes
(media_contents).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relaxd.media.images import NormalImage
from relaxd.media.layout import Grid
from relaxd.media.placeholders import IMAGE
from relaxd.media.sources import MediaError

MediaRecord = Mapping[str, Any]
"""One of prompt_media: {"kind": "image", "sha256": ..., "grid": [1, rows, columns], "bytes": ...}."""


def to_columns(images: Sequence[NormalImage]) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return the columns prompt_media and media_contents (uint8). An image that comes twice is stored once."""
    records: list[dict[str, Any]] = []
    stored: dict[str, bytes] = {}
    for image in images:
        size = 0 if image.sha256 in stored else len(image.png)
        stored.setdefault(image.sha256, image.png)
        records.append({"kind": IMAGE, "sha256": image.sha256, "grid": list(image.size.grid), "bytes": size})
    return records, np.frombuffer(b"".join(stored.values()), np.uint8)


def grids_of(records: Sequence[MediaRecord]) -> list[Grid]:
    """Return the patches of a prompt's images, for `lay_out`."""
    return [(int(time), int(rows), int(columns)) for time, rows, columns in (record["grid"] for record in records)]


def hashes_of(records: Sequence[MediaRecord]) -> tuple[str, ...]:
    """Return the hashes of a prompt's media. Together with its tokens they are the prompt's identity."""
    return tuple(record["sha256"] for record in records)


def contents_of(records: Sequence[MediaRecord], contents: np.ndarray) -> dict[str, bytes]:
    """Return the bytes of a prompt's media by their hashes.

    Raises MediaError: the contents aren't as long as the records say.
    """
    if (said := sum(record["bytes"] for record in records)) != contents.size:
        raise MediaError(f"has {contents.size} bytes of media, but prompt_media says {said}")
    found, start = {}, 0
    for record in records:
        if record["bytes"]:
            found[record["sha256"]] = contents[start : start + record["bytes"]].tobytes()
            start += record["bytes"]
    return found
