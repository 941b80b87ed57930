"""`relaxd up --compose`: the services as containers, with deploy/compose and generated secrets."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

import relaxd
from relaxd.client import CliError
from relaxd.local.port_holder import taken_port
from relaxd.local.state_folder import StateFolder
from relaxd.process.ports import LOOPBACK, free_port, is_free
from relaxd.roles import ROLES
from relaxd.rpc.service_settings import CONSOLE_PORTS
from relaxd.rpc.stack_identity import STACK_VARIABLE, make_stack_identity

BUILD_SECONDS = 3600.0
UP_SECONDS = 300
"""Maximum seconds until the containers are healthy."""
STOP_MARGIN_SECONDS = 15
"""Seconds from the end of a service's grace period until Docker kills its container (compose.yaml)."""
SECRETS_SECONDS = 60.0


class Container(BaseModel):
    """A container of the compose project. Fields are named as in the output of `docker compose ps`."""

    Name: str
    State: str
    """State of the container in Docker's words, such as "running" or "exited"."""
    Status: str = ""
    """Uptime and health of the container in Docker's words, such as "Up 5 minutes (healthy)"."""


class ComposeState(BaseModel):
    """Record of the containers that `relaxd up --compose` started, from which other commands find them."""

    folder: Path
    """Folder that has compose.yaml and the other compose files."""
    coordinator: str
    """Address of the coordinator, host:port."""
    settings: dict[str, str]
    """Environment variables for the compose files, in addition to those in .env."""

    @property
    def console(self) -> str:
        """URL of the console; empty if there is none."""
        port = self.settings.get("CONSOLE_PORT")
        return f"http://{LOOPBACK}:{port}/" if port else ""

    @property
    def token_file(self) -> Path:
        """File with the admin's bearer token."""
        return Path(self.settings["SECRETS"]) / "admin.token"


def read(folder: StateFolder) -> ComposeState | None:
    """Read the record of the started containers; None if none are up."""
    try:
        return ComposeState.model_validate_json(_file(folder).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def use(folder: StateFolder) -> ComposeState | None:
    """Read the record of the started containers, and set environment variables so that this process's calls carry the
    stack's identity, and the admin's token unless another token is set."""
    state = read(folder)
    if state is not None and not os.environ.get("RELAXD_TOKEN"):
        os.environ.setdefault("RELAXD_TOKEN_FILE", str(state.token_file))
    if state is not None and state.settings.get("STACK"):
        os.environ[STACK_VARIABLE] = state.settings["STACK"]
    return state


def up(
    folder: StateFolder,
    port: int,
    replicas: Mapping[str, int],
    grace_seconds: float,
    say: Callable[[str], None],
    *,
    console: bool = True,
) -> ComposeState:
    """Build changed images, start the containers and wait until they are healthy. Raises CliError.

    `port` is the coordinator's port; 0 picks a free port. Without `console` no container serves the web page.
    """
    if port and not is_free(port) and read(folder) is None:
        raise CliError(taken_port(port), "stop it, or use --port 0 for any free port")
    port = port or free_port()
    folder.create()
    console_port = next(filter(is_free, CONSOLE_PORTS), 0) or free_port()
    settings = {
        "COORDINATOR_PORT": str(port),
        **({"CONSOLE_PORT": str(console_port)} if console else {"CONSOLE_REPLICAS": "0"}),
        "STACK": _stack_identity(folder),
        "SECRETS": str(_make_secrets(folder)),
        "GRACE_SECONDS": f"{grace_seconds:g}",
        **{f"{role.upper()}_REPLICAS": str(count) for role, count in replicas.items()},
        # Roles that only some runs need are in profiles of their names.
        "COMPOSE_PROFILES": ",".join(role for role, count in replicas.items() if count and not ROLES[role].replicas),
    }
    state = ComposeState(folder=compose_folder(), coordinator=f"{LOOPBACK}:{port}", settings=settings)
    say("building the images that changed")
    _compose(state, "build", "--quiet", seconds=BUILD_SECONDS)
    say("starting Redis and the services")
    _file(folder).write_text(state.model_dump_json(indent=2))  # `down` finds the containers by this file
    _compose(state, "up", "--detach", "--wait", "--wait-timeout", str(UP_SECONDS), seconds=UP_SECONDS + 60.0)
    return state


def down(folder: StateFolder) -> bool:
    """Stop and remove the containers; runs, models and Redis's data stay. Returns False if no containers were up.
    Raises CliError."""
    state = read(folder)
    if state is None:
        return False
    # Replicas, coordinator and Redis stop in this order, each with its grace.
    grace = float(state.settings["GRACE_SECONDS"]) + STOP_MARGIN_SECONDS
    _compose(state, "--profile", "*", "down", "--remove-orphans", seconds=3 * grace + 60.0)
    _file(folder).unlink()
    return True


def containers(state: ComposeState) -> list[Container]:
    """List the project's containers, running or not. Raises CliError."""
    output = _compose(state, "ps", "--all", "--format", "json", seconds=30.0).strip()
    # Compose 2.21 and newer print one object per line, older versions a list.
    found = json.loads(output) if output.startswith("[") else [json.loads(line) for line in output.splitlines()]
    return sorted((Container.model_validate(one) for one in found), key=lambda container: container.Name)


def compose_folder() -> Path:
    """Return the folder of the compose files. Raises CliError outside a source tree."""
    folder = Path(relaxd.__file__).parents[1] / "deploy" / "compose"
    if not (folder / "compose.yaml").is_file():
        raise CliError(f"{folder} has no compose files", "use relaxd from its source tree")
    return folder


def _file(folder: StateFolder) -> Path:
    return folder.path / "compose.json"


def _stack_identity(folder: StateFolder) -> str:
    """Return the stack identity of the running containers, which their services keep. Create one if none run. Raises
    CliError."""
    known = read(folder)
    if known is not None and known.settings.get("STACK"):
        return known.settings["STACK"]
    try:
        return make_stack_identity(folder.path)
    except ValueError as error:
        raise CliError(str(error)) from error


def _make_secrets(folder: StateFolder) -> Path:
    """Create the random secrets that compose.yaml gives to the services, unless they exist. Returns their folder."""
    place = folder.path / "secrets"
    script = compose_folder().parent / "secrets.sh"
    try:
        words = ["sh", str(script), str(place)]
        subprocess.run(words, capture_output=True, text=True, timeout=SECRETS_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise CliError(f"{script} failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise CliError(f"{script} did not finish within {SECRETS_SECONDS:.0f} s") from error
    return place


def _compose(state: ComposeState, *words: str, seconds: float) -> str:
    command = ["docker", "compose", *words]
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            cwd=state.folder,
            env=os.environ | state.settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise CliError("docker is not installed", "install Docker with its compose plugin") from error
    except subprocess.TimeoutExpired as error:
        raise CliError(f"`{shown}` did not finish within {seconds:.0f} s") from error
    if done.returncode:
        lines = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-12:])
        raise CliError(f"`{shown}` failed:\n{lines}", f"in {state.folder}, docker compose logs shows more")
    return done.stdout
