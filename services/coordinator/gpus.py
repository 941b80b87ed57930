"""Which replica holds which GPU."""

from collections.abc import Collection, Mapping, Sequence

from relaxd.rpc.errors import ResourceExhausted
from relaxd.v1.replica_pb2 import ROLE_ROLLOUT, ROLE_TRAINER, Role

SHARED = "/shared"
"""What the UUID of a GPU has behind it in the records of who holds what, where an engine of a colocated run holds it:
it then may have a second holder, the run's trainer."""


def seen_by(role: "Role.ValueType", holders: Mapping[str, str], *, shared: bool) -> tuple[dict[str, str], set[str]]:
    """Who holds what, as a replica of this role sees it, by UUID; and what it would best share with a partner.

    In a colocated run (`shared`) an engine sees what other engines have, and the trainer what others than engines have.
    """
    engines = {uuid.removesuffix(SHARED): holder for uuid, holder in holders.items() if uuid.endswith(SHARED)}
    others = {uuid: holder for uuid, holder in holders.items() if not uuid.endswith(SHARED)}
    if shared and role == ROLE_ROLLOUT:
        return engines, set(others)
    if shared and role == ROLE_TRAINER:
        return others, set(engines)
    return (others | engines if role == ROLE_ROLLOUT else engines | others), set()


def choose(
    replica_id: str, candidates: Sequence[str], count: int, holders: Mapping[str, str], rather: Collection[str] = ()
) -> list[str]:
    """Pick `count` of the candidates for a replica, in their order: what it holds already, then what nobody holds.

    Of the latter it takes first what it would `rather` have. `holders` says which replica holds a GPU, by UUID. Raises
    ResourceExhausted, naming who holds what.
    """
    held = [uuid for uuid in candidates if holders.get(uuid) == replica_id]
    free = sorted((uuid for uuid in candidates if uuid not in holders), key=lambda uuid: uuid not in rather)
    chosen = set([*held, *free][:count])
    if len(chosen) == count:
        return [uuid for uuid in candidates if uuid in chosen]
    others = [f"{holders[uuid]} holds {uuid}" for uuid in candidates if holders.get(uuid, replica_id) != replica_id]
    raise ResourceExhausted(
        f"{replica_id} needs {_gpus(count)} and sees {len(candidates)}, of which {len(chosen)} can be had"
        + (f": {', '.join(others)}" if others else "")
        + ". Stop what holds them, start fewer replicas, or let it see more"
    )


def could_choose(
    replica_id: str, candidates: Sequence[str], count: int, holders: Mapping[str, str], without: Collection[str]
) -> bool:
    """Whether `choose` could pick so many if some of the holders held nothing."""
    left = {uuid: holder for uuid, holder in holders.items() if holder not in without}
    return sum(left.get(uuid, replica_id) == replica_id for uuid in candidates) >= count


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"
