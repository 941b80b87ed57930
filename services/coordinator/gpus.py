"""Which replica holds which GPU."""

from collections.abc import Mapping, Sequence

from relaxd.rpc.errors import ResourceExhausted


def choose(replica_id: str, candidates: Sequence[str], count: int, holders: Mapping[str, str]) -> list[str]:
    """Pick `count` of the candidates for a replica, in their order: what it holds already, then what nobody holds.

    `holders` says which replica holds a GPU, by UUID. Raises ResourceExhausted, naming who holds what.
    """
    held = [uuid for uuid in candidates if holders.get(uuid) == replica_id]
    free = [uuid for uuid in candidates if uuid not in holders]
    chosen = set([*held, *free][:count])
    if len(chosen) == count:
        return [uuid for uuid in candidates if uuid in chosen]
    others = [f"{holders[uuid]} holds {uuid}" for uuid in candidates if holders.get(uuid, replica_id) != replica_id]
    raise ResourceExhausted(
        f"{replica_id} needs {_gpus(count)} and sees {len(candidates)}, of which {len(chosen)} can be had"
        + (f": {', '.join(others)}" if others else "")
        + ". Stop what holds them, start fewer replicas, or let it see more"
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"
