"""`relaxd console`: the web page that shows what runs do."""

import os
import sys
from typing import Annotated

import typer

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, StateOption
from relaxd.cli.output import show
from relaxd.client import CliError
from relaxd.local import compose
from relaxd.local.programs import CONSOLE_MODULE, console_installed, python_path
from relaxd.local.stack import address_here, open_client
from relaxd.local.state_folder import CONSOLE, StateFolder
from relaxd.process.ports import LOOPBACK


def console(
    host: Annotated[str, typer.Option(help="Address to listen on. Other than loopback's need a token.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: 50080 or the next free one.")] = 0,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show what runs do in a browser: name the URL of the console that is up here, or serve one until it is stopped."""
    if coordinator is None and host == LOOPBACK and not port and (url := _url_here(StateFolder(state))):
        show(f"the console is at {url}")
        return
    address = address_here(state, coordinator)
    if address is None:
        raise CliError(
            f"the console shows what services do, and none are up here (in {StateFolder(state).path})",
            "relaxd report RUN writes the page of a run that has ended; relaxd up starts services; --state DIR or "
            "--coordinator HOST:PORT names others",
        )
    if not console_installed():
        raise CliError("the console needs the package aiohttp, which isn't installed", "pip install relaxd[console]")
    try:
        with open_client(address, state) as client:
            next(client.runs(), None)
    except CliError as error:
        show(f"warning: {error.message}; the page shows runs once it does", file=sys.stderr, flush=True)
    words = ["--coordinator", address, "--host", host, "--port", str(port)]
    # It takes this process's place, so that whoever stops the command stops it.
    command = [sys.executable, "-m", CONSOLE_MODULE, *words]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": python_path()})


def _url_here(folder: StateFolder) -> str:
    """Return the URL of the running console here; empty if there is none."""
    up = folder.read()
    if up is None:
        containers = compose.read(folder)
        return containers.console if containers else ""
    given_up = any(service.role == CONSOLE and service.phase == "failed" for service in up.services)
    return "" if given_up else up.console
