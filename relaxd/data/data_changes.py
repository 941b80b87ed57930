"""Changes of a run's data: a digest, by which a resumed run detects that its prompts have changed, and a check for
media that have changed since the last visit to their prompt, even by an earlier coordinator."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.data.duplicates import Chosen
from relaxd.data.examples import Example
from relaxd.data.files.rows import Joined
from relaxd.data.prompt_checks import evenly_spread
from relaxd.data.sources.prompt_columns import Examples
from relaxd.media.kinds import NormalMedia

logger = logging.getLogger(__name__)

HASH_BYTES = 8
"""Length of the hash of a prompt's media in the file."""
NAMED_ITEMS = 4
"""Maximum number of items that a warning names."""
NAMED_PROMPTS = 20
"""Maximum number of warnings, each about one prompt; the last one says that further prompts aren't named."""


class MediaChanges:
    """Compares the media of each prompt with those of its previous visit.

    The digest of the data covers only the paths and sizes of media files, because reading all contents would take too
    long. So a file replaced by another of the same size is detected here, where it is read anyway. The hashes are
    stored in a file for a restarted coordinator: the digest, then one hash per prompt, 0 if it wasn't visited.
    """

    def __init__(self, prompts: int, digest: str, path: Path) -> None:
        """Load the hashes from a file; ignore them if they belong to data with another digest."""
        self._path: Path | None = path
        self._hashes = np.zeros(prompts, np.uint64)
        self._header = bytes.fromhex(digest)
        self._warned = 0
        try:
            content = path.read_bytes() if path.is_file() else b""
            if content.startswith(self._header):
                stored = content[len(self._header) :][: prompts * HASH_BYTES]
                found = np.frombuffer(stored[: len(stored) // HASH_BYTES * HASH_BYTES], np.uint64)
                self._hashes[: len(found)] = found
            else:
                path.write_bytes(self._header)
        except OSError as error:
            self._give_up(error)

    def look(self, index: int, example: Example, media: Sequence[NormalMedia]) -> None:
        """Warn if a prompt's media differ from those of its last visit, and remember the new ones."""
        names = "".join(one.sha256 for one in media).encode()
        found = np.uint64(int.from_bytes(hashlib.blake2b(names, digest_size=HASH_BYTES).digest(), "little") | 1)
        before, self._hashes[index] = self._hashes[index], found
        if before == found:
            return
        if before:
            self._warn(example)
        self._write(index)

    def _warn(self, example: Example) -> None:
        self._warned += 1
        if self._warned > NAMED_PROMPTS:
            return
        places = ", ".join(item.place for item in example.media[:NAMED_ITEMS])
        more = ", ..." if len(example.media) > NAMED_ITEMS else ""
        last = "; further prompts with changed media aren't named" if self._warned == NAMED_PROMPTS else ""
        logger.warning(
            "%s: its media (%s%s) aren't those of its visit before: new samples see the new ones, so files must stay "
            "as they are while a run needs them%s",
            *(example.place, places, more, last),
        )

    def _write(self, index: int) -> None:
        """Write a hash at its fixed offset: another live coordinator would write the same one there."""
        if self._path is None:
            return
        try:
            file = os.open(self._path, os.O_WRONLY)
            try:
                os.pwrite(file, self._hashes[index].tobytes(), len(self._header) + index * HASH_BYTES)
            finally:
                os.close(file)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Go on without the file."""
        logger.warning(
            "%s can't be used, so media that change while the coordinator is down aren't found: %s", self._path, error
        )
        self._path = None


DIGEST_BYTES = 16
MADE = 512
"""Maximum number of prompts of a large source to build for the digest, to detect changed code or columns."""


def digest_of(examples: Sequence[Example]) -> str:
    """Return a hash of all prompts, their answers, tools, sampling parameters and metadata, and of their order.

    Prompts in memory are hashed one by one. For sources that are read on demand, the hash covers the stored bytes, at
    about 1 GB per second, and some of the prompts.
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
    """Return a media item's source. A file's size is added, because reading its content would take too long."""
    if isinstance(source, list | tuple):  # a video's frames
        return [_source(one) for one in source]
    path = source.get("path") if isinstance(source, dict) and source.get("bytes") is None else source
    try:
        return [source, os.stat(path).st_size] if isinstance(path, str) else source
    except (OSError, ValueError):  # no file: base64, or one that is missing, which is refused when its turn comes
        return source
