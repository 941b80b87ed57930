"""Recent results about media in a process, such as pixels, by the hash of the item."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from relaxd.media.kinds import MEDIA_KINDS
from relaxd.media.sources import MediaError

Item = TypeVar("Item")


class RecentItems(Generic[Item]):
    """Recently used items, by name. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Make it empty.

        Args:
            max_bytes: maximum size of the items that are kept, in bytes.
        """
        self._max_bytes = max_bytes
        self._bytes = 0
        self._items: OrderedDict[str, tuple[Item, int]] = OrderedDict()

    def get(self, name: str) -> Item | None:
        """Return an item; None if it isn't in the cache."""
        found = self._items.get(name)
        return None if found is None else found[0]

    def keep(self, name: str, item: Item, size: int) -> None:
        """Add an item of `size` bytes as the most recent one, and remove the oldest ones beyond the limit."""
        self._bytes += size - self._items.get(name, (item, 0))[1]
        self._items[name] = item, size
        self._items.move_to_end(name)
        while self._bytes > self._max_bytes:
            _, (_, old) = self._items.popitem(last=False)
            self._bytes -= old

    def clear(self) -> None:
        """Remove all items."""
        self._items.clear()
        self._bytes = 0


class MediaCache:
    """Recently used pixels and samples of media. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Make an empty cache.

        Args:
            max_bytes: maximum size of what is kept, in bytes. An item that is larger is still returned.
        """
        self._kept: RecentItems[np.ndarray] = RecentItems(max_bytes)

    def load(
        self, kinds: Mapping[str, str], fetch: Callable[[Sequence[str]], Mapping[str, bytes]]
    ) -> dict[str, np.ndarray]:
        """Return pixels or samples of media by their hashes (`MediaKind.open`), read-only.

        Args:
            kinds: the kind of each item by its hash.
            fetch: returns the stored bytes of the items that aren't here, by their hashes; called once.

        Raises MediaError: an item isn't where it is fetched from; and what `fetch` raises.
        """
        found = {name: values for name in kinds if (values := self._kept.get(name)) is not None}
        missing = [name for name in kinds if name not in found]
        if missing:
            fetched = fetch(missing)
            for name in missing:
                if name not in fetched:
                    raise MediaError(f"{kinds[name]} {name} isn't there any more")
                found[name] = MEDIA_KINDS[kinds[name]].open(fetched[name])
        for name in kinds:
            self._kept.keep(name, found[name], found[name].nbytes)
        return found
