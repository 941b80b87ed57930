"""Address of the coordinator that a command calls."""

import os
from pathlib import Path

from relaxd.client.errors import CliError
from relaxd.local import compose
from relaxd.local.state import StackState, StateFolder
from relaxd.rpc.stack_identity import STACK_VARIABLE


def address_here(state: Path, coordinator: str | None) -> str | None:
    """Return host:port as given, else of the containers or services up here; None if nothing is up here.

    There is no default address: another folder's services may use it.
    """
    if coordinator:
        return coordinator
    if containers := compose.use(StateFolder(state)):
        return containers.coordinator
    stack_state = use_stack(StateFolder(state).read())
    return stack_state.coordinator if stack_state else None


def use_stack(state: StackState | None) -> StackState | None:
    """Let this process's calls carry the identity of the stack of the services here, if there are any."""
    if state is not None and state.stack:
        os.environ[STACK_VARIABLE] = state.stack
    return state


def coordinator_address(state: Path, coordinator: str | None) -> str:
    """Like `address_here`. Raises CliError if nothing is up here."""
    if address := address_here(state, coordinator):
        return address
    raise CliError(
        f"no services are up here (in {StateFolder(state).path})",
        "relaxd up starts them; --state DIR or --coordinator HOST:PORT names others",
    )
