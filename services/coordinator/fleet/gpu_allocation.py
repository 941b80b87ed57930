"""Allocation of GPUs: records of the replicas that hold GPUs, and the choice of GPUs for a lease."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from relaxd.roles import ROLES, ROLLOUT, TRAINER
from relaxd.rpc.errors import ResourceExhausted

OWN = "/own"
"""Suffix of a GPU's UUID in the holder record of a replica that never takes turns on the GPU with other replicas."""
SHARED = "/shared"
"""Suffix of a GPU's UUID in the holder record of a colocated run's engine: the run's trainer may hold the GPU, too."""
PART = "@"
"""First character of the suffix for a share of a GPU: "@judge:0.3" contains the holder's role and share, so that each
holder of a share has a separate record. No UUID contains this character. In a colocated run the suffix follows
SHARED."""
ROUNDING = 1e-9
"""Tolerance for rounding errors in the sum of a GPU's shares: 0.33 + 0.56 + 0.11 is above 1."""


def uuid_of(record: str) -> str:
    """Return the GPU UUID in a holder record."""
    return record.partition(PART)[0].removesuffix(OWN).removesuffix(SHARED)


def share_of(record: str) -> float:
    """Return the share of the GPU in a holder record; 1 is the whole GPU."""
    return float(record.rpartition(":")[2]) if PART in record else 1.0


def suffix_for(role: str, *, shared: bool, share: float = 1.0) -> str:
    """Return the suffix that marks the GPUs of a replica of this role in holder records."""
    if share < 1:
        return f"{SHARED if shared else ''}{PART}{role}:{share!r}"
    if not ROLES[role].takes_turns:
        return OWN
    return SHARED if shared and role == ROLLOUT else ""


def seen_by(
    replica_id: str, role: str, holders: Mapping[str, str], *, shared: bool, share: float = 1.0
) -> tuple[dict[str, str], set[str]]:
    """Return the ids of replicas that exclude a replica from a GPU, by GPU UUID, and the GPUs that it should prefer.

    A replica that doesn't take turns excludes all others. Among the other replicas of a colocated run, only engines
    exclude an engine, and only non-engines exclude the trainer. A replica with a share of a GPU excludes replicas of
    its role, replicas that want the whole GPU (except a colocated run's trainer), and shares that would raise the sum
    above 1.

    Args:
        replica_id: the replica that wants GPUs; it counts as the holder of GPUs that it has unless another excludes it.
        role: the replica's role.
        holders: ids of the replicas that hold GPUs, by holder record.
        shared: True if the run is colocated.
        share: wanted share of each GPU.
    """
    held = {uuid_of(record): replica_id for record, holder in holders.items() if holder == replica_id}
    others = {record: holder for record, holder in holders.items() if holder != replica_id}
    parts = {record: holder for record, holder in others.items() if PART in record}
    whole = {record: holder for record, holder in others.items() if PART not in record}
    if share < 1:
        beside = {record for record in whole if shared and not record.endswith((OWN, SHARED))}  # the trainer's
        excluding = {uuid_of(record): holder for record, holder in whole.items() if record not in beside}
        preferred = {uuid_of(record) for record in (*parts, *beside)}
    else:
        excluding, preferred = _seen_whole(role, whole, shared=shared)
    if shared and role == TRAINER:  # the trainer may share GPUs with the engines and judges of its run
        beside = {record for record in parts if SHARED + PART in record}
        parts = {record: holder for record, holder in parts.items() if record not in beside}
        preferred |= set(map(uuid_of, beside))
    excluding |= _excluding_parts(role, parts, share)
    return held | excluding, preferred - set(excluding)


def _excluding_parts(role: str, parts: Mapping[str, str], share: float) -> dict[str, str]:
    """Return the holders of GPU shares, by GPU UUID, that exclude a replica with this role and wanted share.

    Several holders of the same GPU are joined to one text for the error message of `choose`.
    """
    by_gpu: dict[str, list[str]] = {}
    for record in parts:
        by_gpu.setdefault(uuid_of(record), []).append(record)
    excluding = {}
    for uuid, there in by_gpu.items():
        same_role = any(record.partition(PART)[2].startswith(f"{role}:") for record in there)
        if same_role or sum(map(share_of, there)) + share > 1 + ROUNDING:
            names = (f"{parts[record]} (with a share of {share_of(record):g})" for record in there)
            excluding[uuid] = f" holds {uuid}, ".join(names)
    return excluding


def _seen_whole(role: str, holders: Mapping[str, str], *, shared: bool) -> tuple[dict[str, str], set[str]]:
    """Return the replicas that keep a replica from whole GPUs, by GPU UUID, and the GPUs that it should prefer.

    Considers only holders of whole GPUs; `_excluding_parts` considers holders of shares.

    Args:
        role: the replica's role.
        holders: ids of the replicas that hold whole GPUs, by holder record.
        shared: True if the run is colocated.
    """
    own = {uuid_of(record): holder for record, holder in holders.items() if record.endswith(OWN)}
    engines = {uuid_of(record): holder for record, holder in holders.items() if record.endswith(SHARED)}
    others = {record: holder for record, holder in holders.items() if not record.endswith((OWN, SHARED))}
    if shared and role == ROLLOUT:
        return engines | own, set(others)
    if shared and role == TRAINER:
        return others | own, set(engines)
    return (others | engines if role == ROLLOUT else engines | others) | own, set()


def choose(
    replica_id: str,
    candidates: Sequence[str],
    count: int,
    holders: Mapping[str, str],
    preferred: Collection[str] = (),
    share: float = 1.0,
) -> list[str]:
    """Choose `count` GPUs for a replica from `candidates`: first GPUs that it holds, then free `preferred` GPUs, then
    others.

    Returns their UUIDs in the order of `candidates`. `holders`: replica ids by GPU UUID. Raises ResourceExhausted,
    naming the holders, if too few are free.
    """
    held = [uuid for uuid in candidates if holders.get(uuid) == replica_id]
    free = sorted((uuid for uuid in candidates if uuid not in holders), key=lambda uuid: uuid not in preferred)
    chosen = set([*held, *free][:count])
    if len(chosen) == count:
        return [uuid for uuid in candidates if uuid in chosen]
    others = [f"{holders[uuid]} holds {uuid}" for uuid in candidates if holders.get(uuid, replica_id) != replica_id]
    wanted = f"{share:g} of {_gpus(count)}" if share < 1 else _gpus(count)
    raise ResourceExhausted(
        f"{replica_id} needs {wanted} and sees {len(candidates)}, of which {len(chosen)} are available"
        + (f": {', '.join(others)}" if others else "")
        + ". Stop their holders, start fewer replicas, or make more GPUs visible to it"
    )


def could_choose(replica_id: str, candidates: Sequence[str], count: int, holders: Mapping[str, str]) -> bool:
    """Return True if `choose` would find enough GPUs."""
    return sum(holders.get(uuid, replica_id) == replica_id for uuid in candidates) >= count


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


class GpuHolders:
    """Index of GPU leases: replica ids by holder record (a GPU's UUID and a suffix for the kind of lease), and the
    reverse.

    A lookup takes time in proportion to its result, not to the number of GPUs in the fleet.
    """

    def __init__(self, holders: Mapping[str, str]) -> None:
        """Create the index. `holders` has replica ids by holder record."""
        self._holders: dict[str, str] = {}
        self._records: dict[str, dict[str, None]] = {}
        """Holder records of each replica, by replica id, oldest lease first."""
        self._of_gpu: dict[str, dict[str, None]] = {}
        """Holder records of each GPU, by UUID."""
        for record, replica_id in holders.items():
            self._add(record, replica_id)

    def of(self, replica_id: str) -> list[str]:
        """Return the holder records of a replica, oldest lease first."""
        return list(self._records.get(replica_id, ()))

    def among(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the ids of the replicas that hold these GPUs, by holder record."""
        return {record: self._holders[record] for uuid in uuids for record in self._of_gpu.get(uuid, ())}

    def hold(self, replica_id: str, records: Sequence[str]) -> list[str]:
        """Make a replica the holder of exactly these records, which no other replica may hold.

        Returns the records that the replica held before and lost.
        """
        freed = [record for record in self.of(replica_id) if record not in records]
        self.free(freed)
        for record in records:
            self._add(record, replica_id)
        return freed

    def free(self, records: Iterable[str]) -> None:
        """Remove these holder records."""
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
