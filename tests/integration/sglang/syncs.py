"""Weight synchronisations between the source and an engine."""

from itertools import count

from tests.engines import EngineRunner
from tests.integration.rollout.rollout_kit import Source

NUMBERS = count()
"""Names of groups are never used twice."""


def join(runner: EngineRunner, source: Source) -> str:
    """Connect both sides of a new group; returns its name."""
    name = f"group-{next(NUMBERS)}"
    source.tell(do="connect", name=name, world_size=2)
    runner.join(name, source.port, source.manifest.SerializeToString())
    assert source.answer() == {}
    return name


def transfer(runner: EngineRunner, source: Source, name: str, version: int) -> None:
    """Broadcast and commit a version, checked tensor by tensor."""
    source.tell(do="broadcast", version=version, buckets=None)
    received = runner.receive(name, version, checksum=True)
    assert received["checksums"] == source.answer()["checksums"]


def sync(runner: EngineRunner, source: Source, version: int, mode: str = "in_place") -> int:
    """Pause, send a version in a new group, resume; returns how many samples were held."""
    held = runner.pause(mode)
    transfer(runner, source, join(runner, source), version)
    runner.resume()
    return held
