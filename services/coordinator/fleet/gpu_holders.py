"""Who holds which GPU."""

from collections.abc import Iterable, Mapping, Sequence

from services.coordinator.fleet.gpu_choice import OWN, SHARED


class GpuHolders:
    """Holders by record, which is a GPU's UUID with a suffix of `gpu_choice`, and records by holder.

    Every question takes as long as its answer is, however many GPUs the fleet has.
    """

    def __init__(self, holders: Mapping[str, str]) -> None:
        """`holders`: replica ids by record."""
        self._holders = dict(holders)
        self._records: dict[str, dict[str, None]] = {}
        for record, replica_id in self._holders.items():
            self._records.setdefault(replica_id, {})[record] = None

    def of(self, replica_id: str) -> list[str]:
        """Return the records that a replica holds, in the order in which it got them."""
        return list(self._records.get(replica_id, ()))

    def among(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the holders of these GPUs, by record."""
        records = (uuid + suffix for uuid in uuids for suffix in ("", OWN, SHARED))
        return {record: self._holders[record] for record in records if record in self._holders}

    def hold(self, replica_id: str, records: Sequence[str]) -> list[str]:
        """Let a replica hold exactly these, which nobody else holds. Returns the records that it holds no more."""
        freed = [record for record in self.of(replica_id) if record not in records]
        self.free(freed)
        for record in records:
            self._holders[record] = replica_id
            self._records.setdefault(replica_id, {})[record] = None
        return freed

    def free(self, records: Iterable[str]) -> None:
        """Let nobody hold these."""
        for record in records:
            replica_id = self._holders.pop(record)
            del self._records[replica_id][record]
            if not self._records[replica_id]:
                del self._records[replica_id]
