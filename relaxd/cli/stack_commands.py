"""`relaxd up`, `down`, `status` and `console`: the services of this machine, and the web page that shows runs."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from relaxd.cli.options import (
    DEFAULT_STATE,
    ConsoleOption,
    CoordinatorOption,
    RunArgument,
    StateOption,
    new_console,
    with_replica_options,
)
from relaxd.cli.output import sayer, show
from relaxd.cli.preparing.config_command import check_algorithm
from relaxd.cli.preparing.doctor_command import warn_of_machine
from relaxd.cli.reading import run_tables
from relaxd.cli.reading.status_command import address_lines, print_status
from relaxd.cli.run_checkpoints import save_of_run_in_progress
from relaxd.client import CliError
from relaxd.config.load_toml import ConfigError, load_file
from relaxd.local import compose, stack
from relaxd.local.placement import default_replicas, placed_replicas, placement_problems
from relaxd.local.programs import CONSOLE_MODULE, console_installed, python_path
from relaxd.local.stack import address_here, coordinator_address, open_client
from relaxd.local.state_folder import CONSOLE, StateFolder
from relaxd.process.ports import LOOPBACK
from relaxd.roles import ROLES, TEACHER
from relaxd.rpc.stack_identity import read_stack_identity


@with_replica_options
def up(
    replicas: Mapping[str, int],
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE.toml]",
            help="Configuration of a run that is meant: its \\[placement] says what to start.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The coordinator's port; 0 picks a free one.")] = (
        stack.COORDINATOR_PORT
    ),
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that services may drain when they are stopped.")
    ] = 20.0,
    as_containers: Annotated[
        bool, typer.Option("--compose", help="Run them in containers, with docker compose (docs/deploy.md).")
    ] = False,
    teacher_engine: Annotated[
        str,
        typer.Option(
            help="What holds the model in teacher replicas, megatron or sglang: roles.teacher.engine of runs to come."
            " Default: that of FILE, or else megatron."
        ),
    ] = "",
    web_console: ConsoleOption = True,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Start Redis and the services in the background, as processes or as containers."""
    output, folder = new_console(), StateFolder(state)
    if folder.is_up() or compose.read(folder):
        raise CliError(
            f"services are already up (in {folder.path})", "relaxd status shows them, relaxd down stops them"
        )
    config = load_file(file) if file else None
    if config is not None and (wrong := check_algorithm(config) or placement_problems(config, replicas)):
        raise ConfigError(wrong)
    replicas = placed_replicas(config, replicas) if config else default_replicas() | dict(replicas)
    teacher_engine = teacher_engine or (config.roles.teacher.engine if config else "megatron")
    engines = {TEACHER: teacher_engine}
    if teacher_engine not in ROLES[TEACHER].modules:
        raise CliError(
            f"--teacher-engine is {teacher_engine!r}: it must be one of {', '.join(ROLES[TEACHER].modules)}",
            "it is what roles.teacher.engine is in the runs to come",
        )
    if as_containers and ROLES[TEACHER].modules[teacher_engine] != ROLES[TEACHER].module:
        raise CliError(
            f"--teacher-engine {teacher_engine} is for services that are processes",
            "for containers, add compose.teacher.yaml to COMPOSE_FILE (docs/deploy.md)",
        )
    if as_containers:
        warn_of_machine("compose", state, None, output)
        containers = compose.up(
            folder,
            port,
            replicas,
            grace_seconds,
            sayer(output),
            console=web_console,
        )
        output.print(f"up: the coordinator is at {containers.coordinator}, `docker compose logs` has the logs")
        if containers.console:
            output.print(f"the console is at {containers.console}, for the token in {containers.token_file}")
        return
    warn_of_machine("up", state, None, output)
    with folder.starting("relaxd up"):
        plan = stack.make_plan(
            folder,
            port=port,
            replicas=replicas,
            grace_seconds=grace_seconds,
            engines=engines,
            console=web_console,
        )
        stack.up(folder, plan, sayer(output))
    output.print(f"up: the coordinator is at {plan.coordinator}, logs are in {folder.logs}")
    if plan.console:
        output.print(f"the console is at {plan.console}")


def down(state: StateOption = DEFAULT_STATE) -> None:
    """Stop the services that `relaxd up` started. Each hands back the groups that it holds.

    A run in progress gets a checkpoint first and continues with the next `relaxd up`.
    """
    folder = StateFolder(state)
    address = address_here(state, None)
    run_id = save_of_run_in_progress(address, state, show) if address else ""
    was_up = [compose.down(folder), stack.down(folder, show)]
    show("down" if any(was_up) else f"nothing is up (in {folder.path})")
    if run_id:
        show(f"run {run_id} has not ended: relaxd up continues it")


def status(
    run_id: RunArgument = "",
    addresses: Annotated[
        bool, typer.Option("--addresses", help="Print only the services' addresses, as variables of a shell.")
    ] = False,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show the services, the runs and the queue of each stage."""
    folder, output = StateFolder(state), new_console()
    if not addresses and address_here(state, coordinator) is None:
        output.print(f"no services are up here (in {folder.path}): relaxd up starts them", soft_wrap=True)
        run_tables.print_runs(state, None, output, run_id)
        return
    containers = compose.read(folder) if coordinator is None else None
    with open_client(coordinator_address(state, coordinator), state) as client:
        if addresses:
            show("\n".join(address_lines(client.address, client.replicas(), read_stack_identity())))
            return
        shown = compose.containers(containers) if containers else None
        print_status(client, folder.read(), output, shown, run_id)


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
    # The console replaces this process, so that stopping the command stops the console.
    command = [sys.executable, "-m", CONSOLE_MODULE, *words]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": python_path()})


def _url_here(folder: StateFolder) -> str:
    """Return the URL of the console that runs here; "" if no console runs."""
    found = folder.read()
    if found is None:
        containers = compose.read(folder)
        return containers.console if containers else ""
    given_up = any(service.role == CONSOLE and service.phase == "failed" for service in found.services)
    return "" if given_up else found.console
