"""Weight synchronisations between the source and an engine."""

from tests.engines import EngineRunner
from tests.integration.rollout.rollout_kit import Source


def join(runner: EngineRunner, source: Source, name: str) -> None:
    """Connect both sides of a new group."""
    source.tell(do="connect", name=name, world_size=2)
    runner.join(name, source.port, source.manifest.SerializeToString())
    assert source.answer() == {}


def transfer(runner: EngineRunner, source: Source, name: str, version: int) -> None:
    """Broadcast and commit a version, checked tensor by tensor."""
    source.tell(do="broadcast", version=version, buckets=None)
    received = runner.receive(name, version, checksum=True)
    assert received["checksums"] == source.answer()["checksums"]


def sync(runner: EngineRunner, source: Source, version: int, mode: str = "in_place") -> int:
    """Pause, send a version in a new group, resume; returns how many samples were held."""
    held = runner.pause(mode)
    name = f"group-{version}-{mode}"
    join(runner, source, name)
    transfer(runner, source, name, version)
    runner.resume()
    return held
