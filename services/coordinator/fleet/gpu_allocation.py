"""Allocation of GPUs: the replicas that hold them, and the choice of GPUs for a lease."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from relaxd.roles import ROLES, ROLLOUT, TRAINER
from relaxd.rpc.errors import ResourceExhausted

OWN = "/own"
"""Suffix of a GPU's UUID in the holder records of a replica that never takes turns."""
SHARED = "/shared"
"""Suffix of a GPU's UUID in the holder record of a colocated run's engine: the run's trainer may hold the GPU, too."""
PART = "@"
"""First character of the suffix for a share of a GPU: "@judge:0.3" contains the holder's role and share, so that each
holder of a share has a separate record. No UUID contains this character. In a colocated run it follows SHARED."""
ROUNDING = 1e-9
"""Maximum rounding error of the sum of a GPU's shares: 0.33 + 0.56 + 0.11 is above 1."""


def uuid_of(record: str) -> str:
    """Return the UUID in a holder record's key."""
    return record.partition(PART)[0].removesuffix(OWN).removesuffix(SHARED)


def share_of(record: str) -> float:
    """Return the GPU share in a holder record's key; 1 is the whole GPU."""
    return float(record.rpartition(":")[2]) if PART in record else 1.0


def suffix_for(role: str, *, shared: bool, share: float = 1.0) -> str:
    """Return the suffix for the holder records of GPUs that a replica of this role leases."""
    if share < 1:
        return f"{SHARED if shared else ''}{PART}{role}:{share!r}"
    if not ROLES[role].takes_turns:
        return OWN
    return SHARED if shared and role == ROLLOUT else ""


def seen_by(
    replica_id: str, role: str, holders: Mapping[str, str], *, shared: bool, share: float = 1.0
) -> tuple[dict[str, str], set[str]]:
    """Return the holders that exclude a replica from a GPU, by UUID, and the GPUs that the replica should prefer.

    A replica that doesn't take turns excludes all others. Among the other replicas of a colocated run, only engines
    exclude an engine, and only non-engines exclude the trainer. A replica with a share of a GPU excludes replicas of
    its role, replicas that want the whole GPU (except a colocated run's trainer), and shares that would raise the sum
    above 1.

    Args:
        replica_id: the replica; it counts as the holder of its own GPUs unless another holder excludes it.
        role: its role.
        holders: replica ids by record.
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
    """Return the holders of shares, by UUID, that exclude a replica of this role and wanted share.

    Several holders of one GPU become one text for the error message of `choose`.
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
    """Return the holders that keep a replica from whole GPUs, by UUID, and the GPUs that it should prefer.

    Considers only holders of whole GPUs; `_excluding_parts` considers those of shares.

    Args:
        role: the replica's role.
        holders: ids of the replicas that hold whole GPUs, by record.
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
    """Choose `count` candidates for a replica: first GPUs that it holds, then free `preferred` GPUs, then other free
    GPUs.

    Returns them in the order of the candidates. `holders`: replica ids by GPU UUID. Raises ResourceExhausted, naming
    the holders.
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
    """Return whether `choose` would succeed."""
    return sum(holders.get(uuid, replica_id) == replica_id for uuid in candidates) >= count


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


class GpuHolders:
    """Index of GPU leases: holders by record (a GPU's UUID and a suffix for the kind of lease), and the reverse.

    A lookup takes time in proportion to its result, not to the number of GPUs in the fleet.
    """

    def __init__(self, holders: Mapping[str, str]) -> None:
        """`holders`: replica ids by record."""
        self._holders: dict[str, str] = {}
        self._records: dict[str, dict[str, None]] = {}
        """Records of each holder, oldest lease first."""
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
        """Make a replica the holder of exactly these records; no other replica may hold them. Returns the records that
        the replica lost."""
        freed = [record for record in self.of(replica_id) if record not in records]
        self.free(freed)
        for record in records:
            self._add(record, replica_id)
        return freed

    def free(self, records: Iterable[str]) -> None:
        """Remove the holder of these records."""
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
