"""The table of GPUs and the replicas that hold them."""

from collections.abc import Iterable, Mapping, Sequence

from services.coordinator.fleet.gpu_choice import uuid_of


class GpuHolders:
    """Holders by record, which is a GPU's UUID with a suffix of `gpu_choice`, and records by holder.

    Every question takes as long as its answer is, however many GPUs the fleet has.
    """

    def __init__(self, holders: Mapping[str, str]) -> None:
        """`holders`: replica ids by record."""
        self._holders: dict[str, str] = {}
        self._records: dict[str, dict[str, None]] = {}
        """By holder, in the order in which it got them."""
        self._of_gpu: dict[str, dict[str, None]] = {}
        """Records by UUID."""
        for record, replica_id in holders.items():
            self._add(record, replica_id)

    def of(self, replica_id: str) -> list[str]:
        """Return the records that a replica holds, in the order in which it got them."""
        return list(self._records.get(replica_id, ()))

    def among(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the holders of these GPUs, by record."""
        return {record: self._holders[record] for uuid in uuids for record in self._of_gpu.get(uuid, ())}

    def hold(self, replica_id: str, records: Sequence[str]) -> list[str]:
        """Let a replica hold exactly these, which nobody else holds. Returns the records that it holds no more."""
        freed = [record for record in self.of(replica_id) if record not in records]
        self.free(freed)
        for record in records:
            self._add(record, replica_id)
        return freed

    def free(self, records: Iterable[str]) -> None:
        """Let nobody hold these."""
        for record in records:
            replica_id = self._holders.pop(record)
            for index, key in ((self._records, replica_id), (self._of_gpu, uuid_of(record))):
                del index[key][record]
                if not index[key]:
                    del index[key]

    def _add(self, record: str, replica_id: str) -> None:
        self._holders[record] = replica_id
        self._records.setdefault(replica_id, {})[record] = None
        self._of_gpu.setdefault(uuid_of(record), {})[record] = None
