"""Media of upcoming prompts, normalised in threads beside the publisher."""

import os
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import RLock

from relaxd.data.examples import Example
from relaxd.data.vision import PromptHostAway, VisionModel, normalise
from relaxd.media.kinds import NormalMedia
from relaxd.media.sources import RemoteItem, with_hosts
from relaxd.models import DataError

KEPT = 48
"""Maximum number of prompts whose media are kept or in progress: about the current batch and the next two."""
THREADS = min(4, os.cpu_count() or 1)
"""Number of threads. Decoding, resizing and PNG release Python's lock."""
DEADLINE_SECONDS = 300
"""Maximum seconds until a prompt's media are ready: a disk may hang, and slow items may be fetched one by one."""


class MediaAhead:
    """The media of prompts in their normal form, by index. Thread-safe."""

    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision
        self._pool = ThreadPoolExecutor(THREADS, "media")
        self._found: OrderedDict[int, Future[list[NormalMedia]]] = OrderedDict()
        self._awaited: list[int] = []
        """Indices that takers wait for, one for each taker."""
        self._lock = RLock()

    def expect(self, examples: Iterable[tuple[int, Example]]) -> None:
        """Start normalising the media of prompts that aren't in progress, or that failed: a file or host may be
        back."""
        with self._lock:
            for index, example in examples:
                found = self._found.get(index)
                if example.media and (found is None or (found.done() and found.exception() is not None)):
                    self._found[index] = self._pool.submit(normalise, example, self._vision)

    def take(self, index: int, example: Example) -> list[NormalMedia]:
        """Return a prompt's media, and drop the oldest kept ones.

        Raises PromptHostAway if one of their hosts doesn't answer now, DataError if they are wrong.
        """
        if not example.media:
            return []
        with self._lock:
            self.expect([(index, example)])
            self._found.move_to_end(index)
            found = self._found[index]
            self._awaited.append(index)
            while len(self._found) > KEPT:
                oldest, dropped = self._found.popitem(last=False)
                if oldest not in self._awaited:
                    dropped.cancel()
        try:
            return found.result(DEADLINE_SECONDS)
        except TimeoutError as error:
            hosts = _hosts(example)
            told = f" from {', '.join(hosts)}" if hosts else ""
            problem = PromptHostAway if hosts else DataError
            raise problem("data", f"{example.place}: its media{told} weren't read in {DEADLINE_SECONDS} s") from error
        finally:
            with self._lock:
                self._awaited.remove(index)


def _hosts(example: Example) -> list[str]:
    """Return the hosts of a prompt's media that are at addresses, frames of videos included."""
    sources = [with_hosts(item.source, ()) for item in example.media]
    items = [item for source in sources for item in (source if isinstance(source, list) else [source])]
    return sorted({item.host for item in items if isinstance(item, RemoteItem)})
