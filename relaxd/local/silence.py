"""State of an unresponsive coordinator: its process or container is stopped, gone, or only silent."""

from collections.abc import Callable
from pathlib import Path

import psutil

from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local import compose
from relaxd.local.state_folder import ServiceState, StateFolder
from relaxd.roles import COORDINATOR

Known = tuple[str, str]
"""Known state of the coordinator, and advice, both for people."""


def open_client(address: str, state: Path) -> CoordinatorClient:
    """Return a client whose errors add the known state of the coordinator, if it belongs to a state folder here."""
    return CoordinatorClient(address, why_silent=why_silent(state))


def why_silent(state: Path) -> Callable[[str], Known | None]:
    """Return a function that says what is known of the coordinator at an address.

    It returns None if the coordinator isn't that of the services in this state folder.
    """
    folder = StateFolder(state)

    def known(address: str) -> Known | None:
        stack = folder.read()
        if stack is not None and stack.coordinator == address:
            service = next((one for one in stack.services if one.role == COORDINATOR), None)
            return _of_process(folder, stack.pid, service) if service is not None else None
        containers = compose.read(folder)
        if containers is not None and containers.coordinator == address:
            return _of_container(containers)
        if stack is not None:
            return "it isn't the coordinator of the services here", f"that one is at {stack.coordinator}"
        return None

    return known


def _of_process(folder: StateFolder, supervisor: int, service: ServiceState) -> Known:
    """Return the known state of the coordinator's process."""
    log = f"its log is {folder.log(service.name)}"
    if service.phase == "failed":
        return f"it kept dying (exit code {service.exit_code}), and its supervisor gave it up", log
    status = _status(service.pid)
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process is stopped (pid {service.pid})", f"kill -CONT {service.pid} lets it go on"
    if status is not None and service.phase != "restarting":
        return f"its process runs (pid {service.pid})", log
    if _status(supervisor) == psutil.STATUS_STOPPED:
        return (
            f"its process is gone, and its supervisor is stopped (pid {supervisor})",
            f"kill -CONT {supervisor} lets it start the coordinator again",
        )
    return f"its process is gone, and its supervisor (pid {supervisor}) starts it again", log


def _of_container(containers: compose.ComposeState) -> Known | None:
    """Return the known state of the coordinator's container."""
    try:
        found = [one for one in compose.containers(containers) if COORDINATOR in one.Name]
    except CliError:
        return None
    if not found:
        return "it has no container any more", "relaxd down, then relaxd up --compose"
    return f"its container {found[0].Name} is {found[0].State}", "`docker compose logs coordinator` has its log"


def _status(pid: int | None) -> str | None:
    """Return the status of a process; None if there is none."""
    try:
        status = psutil.Process(pid).status() if pid else None
    except psutil.NoSuchProcess:
        return None
    return None if status == psutil.STATUS_ZOMBIE else status
