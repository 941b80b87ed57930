"""`relaxd console`: the web page that shows what runs do."""

import os
import subprocess
import sys
from typing import Annotated

import typer

from relaxd.cli.options import DEFAULT_STATE, StateOption
from relaxd.cli.output import show
from relaxd.client import CliError
from relaxd.local import compose
from relaxd.local.programs import CONSOLE_MODULE, python_path
from relaxd.local.stack import coordinator_address
from relaxd.local.state_folder import StateFolder
from relaxd.process.ports import LOOPBACK

STOP_SECONDS = 30.0
"""Time for the console to end after Ctrl-C, which reaches it, too."""


def console(
    connect: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Coordinator's host:port; default: that of the services up here."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Other than loopback's need a token.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: 50080 or the next free one.")] = 0,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Show what runs do in a browser: name the URL of the console that is up here, or serve one until it is stopped."""
    up = StateFolder(state).read() or compose.read(StateFolder(state))
    if connect is None and up is not None and up.console and host == LOOPBACK and not port:
        show(f"the console is at {up.console}")
        return
    address = coordinator_address(state, connect)
    words = ["--coordinator", address, "--host", host, "--port", str(port)]
    program = subprocess.Popen(
        [sys.executable, "-m", CONSOLE_MODULE, *words], env=os.environ | {"PYTHONPATH": python_path()}
    )
    try:
        code = program.wait()  # until somebody stops it
    except KeyboardInterrupt:
        code = 0
        program.wait(timeout=STOP_SECONDS)
    if code:
        raise CliError(f"the console ended with exit code {code}", "pip install relaxd[console] if it lacks aiohttp")
