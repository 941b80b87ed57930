"""Digest of training data, by which a resumed run detects that its prompts have changed."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from relaxd.data.duplicates import Chosen
from relaxd.data.examples import Example
from relaxd.data.files.rows import Joined
from relaxd.data.prompt_checks import evenly_spread
from relaxd.data.sources.prompt_columns import Examples

DIGEST_BYTES = 16
MADE = 512
"""Maximum number of prompts of a large source to make, to detect changed code or columns."""


def digest_of(examples: Sequence[Example]) -> str:
    """Return a hash of all prompts, their answers, tools, sampling parameters and metadata, and of their order.

    Prompts in memory are hashed one by one. Of sources that are read on demand the stored bytes are, about a gigabyte a
    second, and some prompts.
    """
    found = hashlib.blake2b(f"{len(examples)}\n".encode(), digest_size=DIGEST_BYTES)
    for content in _contents(examples):
        found.update(content)
    return found.hexdigest()


def _contents(examples: Sequence[Example]) -> Iterator[bytes]:
    if isinstance(examples, Joined):
        for part in examples.parts:
            yield from _contents(part)
    elif isinstance(examples, Chosen):
        yield examples.places.tobytes()
        yield from _contents(examples.all)
    elif isinstance(examples, Examples):
        yield from examples.content()
        for index in evenly_spread(len(examples), MADE):
            try:
                yield _text(examples[index])
            except ValueError:  # a wrong row, which stops the run when its turn comes
                yield b"wrong\n"
    else:
        yield from map(_text, examples)


def _text(example: Example) -> bytes:
    """Return the complete text of a prompt. The order of entries is kept if a chat template may write them."""
    media = [[_source(item.source) for item in example.media]] if example.media else []
    seen = json.dumps([example.prompt, example.answer, example.tools, example.sampling, *media], default=str)
    return f"{seen}{json.dumps(example.metadata, sort_keys=True, default=str)}\n".encode()


def _source(source: Any) -> Any:
    """Return a media item in its source form, for a file with its size: its content would take too long to read."""
    if isinstance(source, list | tuple):  # a video's frames
        return [_source(one) for one in source]
    path = source.get("path") if isinstance(source, dict) and source.get("bytes") is None else source
    try:
        return [source, os.stat(path).st_size] if isinstance(path, str) else source
    except (OSError, ValueError):  # no file: base64, or one that is missing, which is refused when its turn comes
        return source
