"""Decide when engines get new weights."""

from collections.abc import Sequence

from services.coordinator.fleet.registry import Version


def is_due(announced: Version, served: Sequence[Version | None], *, interval: int, last: int) -> bool:
    """Return whether the engines are to get the announced weights now.

    They are after every `interval` versions, counted from the oldest one that an engine serves, as the gate counts.
    They are at once when an engine serves none of this term: it has joined, was quarantined, or the trainer is another.
    The gate lets prompts in for max_staleness + 1 >= interval steps after that oldest version, so that the steps up to
    the next synchronisation can always be filled.

    Args:
        announced: the trainer's newest weights.
        served: what each engine serves; None for nothing.
        interval: weights.interval.
        last: version of the run's last step, which is always sent.
    """
    term, version = announced
    if any(one is None or one[0] != term for one in served):
        return True
    behind = version - min((one[1] for one in served if one is not None), default=version)
    return behind >= interval or (behind > 0 and version >= last)
