"""The order of weight synchronisations, enforced by trainer and engines."""

import time

from relaxd.rpc.errors import FailedPrecondition, InvalidArgument

MAX_AHEAD_SECONDS = 24 * 3600.0
"""How far the coordinator's clock may be ahead of this machine's."""


class SyncIds:
    """Refuses calls of a weight synchronisation once a call of a later one has come.

    Ids are Unix milliseconds. An id from the future is refused as well, because it would block every real one after it.
    """

    def __init__(self) -> None:
        self._last = 0

    def take(self, sync_id: int) -> None:
        """Accept a call of this synchronisation.

        Raises FailedPrecondition when a later one was seen, InvalidArgument when the id lies in the future.
        """
        if sync_id < self._last:
            raise FailedPrecondition(
                f"sync_id is {sync_id}, but {self._last} was seen: it is over", reason="SYNC_SUPERSEDED"
            )
        if sync_id > (time.time() + MAX_AHEAD_SECONDS) * 1000:
            problem = f"is {sync_id}: ids are Unix milliseconds, and that is more than a day ahead"
            raise InvalidArgument(f"sync_id {problem}", [("sync_id", problem)])
        self._last = sync_id
