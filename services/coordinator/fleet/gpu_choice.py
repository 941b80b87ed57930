"""Choice of GPUs for a lease."""

from collections.abc import Collection, Mapping, Sequence

from relaxd.roles import ROLES, ROLLOUT, TRAINER
from relaxd.rpc.errors import ResourceExhausted

OWN = "/own"
"""Suffix of a GPU's UUID in the holder records if a replica holds it that never takes turns."""
SHARED = "/shared"
"""Suffix of a GPU's UUID in the holder records if an engine of a colocated run holds it: the run's trainer may then be
a second holder."""


def uuid_of(record: str) -> str:
    """Return the UUID in a holder record's key."""
    return record.removesuffix(OWN).removesuffix(SHARED)


def suffix_for(role: str, *, shared: bool) -> str:
    """Return the suffix of the GPUs that a replica of this role leases."""
    if not ROLES[role].takes_turns:
        return OWN
    return SHARED if shared and role == ROLLOUT else ""


def seen_by(role: str, holders: Mapping[str, str], *, shared: bool) -> tuple[dict[str, str], set[str]]:
    """Return the holders by UUID that exclude a replica of this role, and the GPUs that it should prefer to share.

    Replicas that don't take turns exclude all others. In a colocated run (`shared`), else only engines exclude an
    engine, and only non-engines exclude the trainer.
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
    replica_id: str, candidates: Sequence[str], count: int, holders: Mapping[str, str], preferred: Collection[str] = ()
) -> list[str]:
    """Choose `count` candidates for a replica: first GPUs that it holds, then free ones, of which `preferred` first.

    Returns them in the order of the candidates. `holders`: replica ids by GPU UUID. Raises ResourceExhausted, naming
    the holders.
    """
    held = [uuid for uuid in candidates if holders.get(uuid) == replica_id]
    free = sorted((uuid for uuid in candidates if uuid not in holders), key=lambda uuid: uuid not in preferred)
    chosen = set([*held, *free][:count])
    if len(chosen) == count:
        return [uuid for uuid in candidates if uuid in chosen]
    others = [f"{holders[uuid]} holds {uuid}" for uuid in candidates if holders.get(uuid, replica_id) != replica_id]
    raise ResourceExhausted(
        f"{replica_id} needs {_gpus(count)} and sees {len(candidates)}, of which {len(chosen)} are available"
        + (f": {', '.join(others)}" if others else "")
        + ". Stop their holders, start fewer replicas, or make more GPUs visible to it"
    )


def could_choose(
    replica_id: str, candidates: Sequence[str], count: int, holders: Mapping[str, str], without: Collection[str]
) -> bool:
    """Return whether `choose` would succeed if the holders in `without` held nothing."""
    left = {uuid: holder for uuid, holder in holders.items() if holder not in without}
    return sum(left.get(uuid, replica_id) == replica_id for uuid in candidates) >= count


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"
