"""Address of the coordinator that a command calls."""

from pathlib import Path

from relaxd.local import compose, stack
from relaxd.local.state import StateFolder


def coordinator_address(state: Path, coordinator: str | None) -> str:
    """Return host:port as given, else of the containers or services up here, else the default local one."""
    if coordinator:
        return coordinator
    if containers := compose.use(StateFolder(state)):
        return containers.coordinator
    stack_state = StateFolder(state).read()
    return stack_state.coordinator if stack_state else f"127.0.0.1:{stack.COORDINATOR_PORT}"
