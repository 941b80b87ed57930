"""The order of weight synchronisations, as trainer and engines keep it."""

import time

from relaxd.rpc.errors import FailedPrecondition, InvalidArgument

MAX_AHEAD_SECONDS = 24 * 3600.0
"""How far the coordinator's clock may be ahead of this machine's."""


class SyncIds:
    """Remembers the last synchronisation that was heard of: calls of earlier ones are refused.

    Ids are Unix milliseconds. One from the future would close the door to every real one after it, so it is refused,
    too.
    """

    def __init__(self) -> None:
        self._last = 0

    def take(self, sync_id: int) -> None:
        """A call of this synchronisation came. Raises FailedPrecondition: it is over; InvalidArgument: it can't be."""
        if sync_id < self._last:
            raise FailedPrecondition(f"sync_id is {sync_id}, but {self._last} was seen: it is over")
        if sync_id > (time.time() + MAX_AHEAD_SECONDS) * 1000:
            problem = f"is {sync_id}: ids are Unix milliseconds, and that is more than a day ahead"
            raise InvalidArgument(f"sync_id {problem}", [("sync_id", problem)])
        self._last = sync_id
