"""Samples of a step that people are shown: column <i> of an attempt has the i-th one, as JSON.

They are on the board's Redis also where there are data nodes: they are few, and Redis keeps only the newest.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relaxd.board.payloads.attempt import Attempt, Place, new_names, places
from relaxd.board.payloads.encoding import decode_columns

SHOWN_BYTES = 16 << 20
"""Maximum bytes of a step's samples, unless the first alone has more. Redis keeps as many bytes of all steps."""


def samples_attempt(prefix: str, step: int, samples: Sequence[Mapping[str, Any]]) -> tuple[int, Attempt]:
    """Encode samples outside the script. Returns the number that fits into SHOWN_BYTES, and those samples."""
    columns = {}
    left = SHOWN_BYTES
    for index, sample in enumerate(samples):
        text = json.dumps(sample).encode()
        left -= len(text)
        if index and left < 0:
            break
        columns[str(index)] = np.frombuffer(text, np.uint8)
    return len(columns), Attempt(prefix, new_names([f"step-{step}"])[0], columns, large_bytes=0)


def sample_places(prefix: str, pointer: str, indices: Sequence[int]) -> list[Place]:
    """Return where samples of a step are. Raises ValueError: the pointer is damaged."""
    names = [str(index) for index in indices]
    placed = places(prefix, pointer, names)
    return [placed[name] for name in names]


def decode_sample(payload: bytes) -> dict[str, Any]:
    """Decode a payload of one sample. Raises ColumnError, ValueError."""
    (column,) = decode_columns(payload).values()
    sample: dict[str, Any] = json.loads(np.asarray(column).tobytes())
    return sample
