"""The shared parts of an active run."""

from dataclasses import dataclass

from relaxd.config import RunConfig
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.state.run_board import RunBoard
from services.coordinator.state.store import AsyncStore


@dataclass(frozen=True)
class RunContext:
    """The parts of one run that publishing, evaluation, weight synchronisation and health share."""

    run_id: str
    config: RunConfig
    board: RunBoard
    store: AsyncStore
    fleet: Fleet
    peers: Peers
    launcher: str = ""
    """Address of the launcher; empty: there is none."""

    @property
    def registry(self) -> Registry:
        """The replicas of all runs."""
        return self.fleet.registry

    @property
    def term(self) -> int:
        """This coordinator's fencing term."""
        return self.store.term
