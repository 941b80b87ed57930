"""Which faults befall a job, by what it keeps its samples in."""

from tests.chaos.faults import Fault, all_faults
from tests.chaos.planes.data_node_faults import data_node_faults
from tests.chaos.planes.media_host_faults import media_host_faults
from tests.chaos.planes.payload_faults import payload_faults
from tests.chaos.planes.primary_faults import primary_faults
from tests.chaos.stack import ALGORITHMS, FROZEN_REPLICAS, OWN_REPLICAS

MEDIA_FAULTS = tuple(
    f"{what} {whom}"
    for what in ("kill", "restart", "stall", "freeze")
    for whom in ("agent", "both agents", "coordinator", "rollout", "both rollouts", "engine", "trainer", "redis")
)
"""First words of the faults of services that read, keep or look at media."""


def kinds_of(algorithm: str = "grpo", columns: str = "small", redis: str = "single") -> list[Fault]:
    """Every kind of fault for a job.

    Primaries have faults of their own, and so have large columns on a single Redis or on data nodes: the ordinary ones
    have other runs, except a run with media, which also has the deaths and stops of those that handle them.
    """
    if redis != "single":
        return primary_faults(redis)
    by_columns = {"large": payload_faults, "on-nodes": data_node_faults}
    kinds = by_columns[columns]() if columns in by_columns else all_faults(algorithm)
    if algorithm in ("media", "shown-media") and columns in by_columns:
        kinds += [fault for fault in all_faults(algorithm) if fault.name.startswith(MEDIA_FAULTS)]
    if algorithm == "media":
        kinds += media_host_faults()
    absent = set() if ALGORITHMS[algorithm]["roles"] else set(FROZEN_REPLICAS)
    if "agent" in OWN_REPLICAS.get(algorithm, {}):  # agents have the payloads that rollout replicas have otherwise
        kinds = [fault for fault in kinds if not fault.name.startswith("payload: rollout")]
    else:
        absent.add("agent")
    return [fault for fault in kinds if absent.isdisjoint(fault.name.split())]
