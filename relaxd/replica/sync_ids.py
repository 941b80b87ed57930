"""The order of weight synchronisations, enforced by trainer and engines."""

from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from relaxd.rpc.terms import NewestTerm

MAX_SYNC_ID = 2**62
"""Largest id. No coordinator comes near it, and one that is larger by mistake would block every real one after it."""


class SyncIds:
    """Refuses calls of a weight synchronisation once a call of a later one has come from the same coordinator.

    Ids ascend within a coordinator's term; a later one may begin with smaller ids, because its Redis may have lost the
    last one and its clock may have been set. Calls of earlier terms are refused before (`NewestTerm`). No id is
    compared with this machine's clock, which may be wrong by days.
    """

    def __init__(self, coordinator: NewestTerm | None = None) -> None:
        """`coordinator` has the term of the coordinator that is obeyed; None: there is only one."""
        self._coordinator = coordinator
        self._term = 0
        self._last = 0

    def take(self, sync_id: int) -> None:
        """Accept a call of this synchronisation.

        Raises FailedPrecondition when a later one was seen, InvalidArgument when the id is too large.
        """
        if sync_id > MAX_SYNC_ID:
            problem = f"is {sync_id}: it must be at most {MAX_SYNC_ID}"
            raise InvalidArgument(f"sync_id {problem}", [("sync_id", problem)])
        term = self._coordinator.newest if self._coordinator is not None else 0
        last = self._last if term == self._term else 0
        if sync_id < last:
            raise FailedPrecondition(f"sync_id is {sync_id}, but {last} was seen: it is over", reason="SYNC_SUPERSEDED")
        self._term, self._last = term, sync_id
