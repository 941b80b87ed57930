"""The stack of services on this machine: start, stop, the coordinator's address, and clients of the coordinator."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import psutil

from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local import compose, embedded_redis
from relaxd.local.embedded_redis import without_password, write_private
from relaxd.local.port_holder import taken_port
from relaxd.local.programs import CONSOLE_MODULE, console_installed, python_path
from relaxd.local.state_folder import CONSOLE, ServiceState, StackState, StateFolder
from relaxd.local.supervisor import ServiceSpec, StackPlan
from relaxd.process.ports import LOOPBACK, free_port, reservations, reserve
from relaxd.roles import COORDINATOR, REPLICA_ROLES, ROLES
from relaxd.rpc.service_settings import CONSOLE_PORTS, checked_address
from relaxd.rpc.stack_identity import STACK_VARIABLE, make_stack_identity

Known = tuple[str, str]
"""Two texts for the user: why a coordinator doesn't answer, as far as known, and advice."""


def open_client(address: str, state: Path) -> CoordinatorClient:
    """Return a client of the coordinator. Its errors say why the coordinator doesn't answer, if `state` belongs to
    it."""
    return CoordinatorClient(address, why_silent=why_silent(state))


def why_silent(state: Path) -> Callable[[str], Known | None]:
    """Return a function that, given a coordinator's address, says why this coordinator doesn't answer.

    The function returns None if the state folder says nothing about the coordinator.
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
    """Return why the coordinator's process doesn't answer, and advice."""
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
    """Return why the coordinator's container doesn't answer, and advice; None if Docker can't tell."""
    try:
        found = [one for one in compose.containers(containers) if COORDINATOR in one.Name]
    except CliError:
        return None
    if not found:
        return "it has no container any more", "relaxd down, then relaxd up --compose"
    return f"its container {found[0].Name} is {found[0].State}", "`docker compose logs coordinator` has its log"


def _status(pid: int | None) -> str | None:
    """Return psutil's status of the process `pid`; None if there is none or it has ended."""
    try:
        status = psutil.Process(pid).status() if pid else None
    except psutil.NoSuchProcess:
        return None
    return None if status == psutil.STATUS_ZOMBIE else status


COORDINATOR_PORT = 50050
ENDING_SECONDS = 60.0
"""Maximum seconds for the supervisor to stop services of which some did not come up."""
DOWN_SECONDS = 120.0
"""Maximum seconds for the services to end in `down`."""
SAY_SECONDS = 3.0
"""Seconds between two messages of `down` about services that haven't stopped."""
READY_SECONDS = 120.0
"""Maximum seconds until the next service registers, once Redis has loaded its data."""


def make_plan(
    folder: StateFolder,
    *,
    port: int | None = COORDINATOR_PORT,
    replicas: Mapping[str, int] | None = None,
    redis_data: Path | None = None,
    stop_with_parent: bool = False,
    grace_seconds: float = 20.0,
    engines: Mapping[str, str] | None = None,
    console: bool = False,
) -> StackPlan:
    """Plan Redis (unless REDIS_URL names one), the coordinator and the replicas of each role.

    `replicas`: number of replicas by role, if it differs from `Role.replicas`. `engines`: engine by role, if it can be
    chosen (`Role.modules`) and isn't the default. `port`: the coordinator's port; 0 picks a free one, None the default
    one if it is free. The port stays reserved, in this process and in the supervisor. With `console`, a console is
    served at the first free port of CONSOLE_PORTS, if aiohttp is installed.

    Raises CliError: the port is taken, RELAXD_STACK is invalid, or there is no Redis.
    """
    try:
        stack = make_stack_identity(folder.path)
    except ValueError as error:
        raise CliError(str(error)) from error
    if port is None:
        port = COORDINATOR_PORT if reserve(COORDINATOR_PORT) else 0
    elif port and not reserve(port):
        raise CliError(taken_port(port), "stop it, or use --port 0 for any free port")
    coordinator = f"{LOOPBACK}:{port or free_port()}"
    services = []
    folder.create()
    given = embedded_redis.given_url()
    if given is None:
        redis_port, password = free_port(), secrets.token_urlsafe(24)
        redis_url = embedded_redis.url(redis_port)
        command = embedded_redis.server_command(redis_data or folder.redis_data, redis_port, password)
        services.append(ServiceSpec(name="redis", role="redis", command=command))
    else:
        embedded_redis.wait_until_up(given, seconds=5)
        redis_url, password = without_password(given)
    if password:
        write_private(folder.redis_password, password)
    password_file = str(folder.redis_password) if password else ""
    common = {
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "RELAXD_HOST": LOOPBACK,
        "RELAXD_COORDINATOR": coordinator,
        STACK_VARIABLE: stack,
        "RELAXD_REDIS": redis_url,
        "RELAXD_REDIS_PASSWORD_FILE": password_file,
        "RELAXD_GRACE_SECONDS": str(grace_seconds),
    }
    launcher = f"{LOOPBACK}:{free_port()}"
    services.append(
        ServiceSpec(
            name="launcher",
            role="launcher",
            command=[sys.executable, "-m", "relaxd.local.local_launcher", str(folder.path)],
            environment={**common, "RELAXD_PORT": launcher.rpartition(":")[2]},
        )
    )
    templates = {}
    for role in ROLES.values():
        count = (replicas or {}).get(role.name, role.replicas)
        environment = {**common, "RELAXD_PORT": "0"}
        if role.name == COORDINATOR:
            environment |= {
                "RELAXD_PORT": coordinator.rpartition(":")[2],
                "RELAXD_LAUNCHER": launcher,
                "RELAXD_LOGS": str(folder.logs),
            }
        module = role.modules.get((engines or {}).get(role.name, ""), role.module)
        spec = ServiceSpec(
            name=role.name, role=role.name, command=[sys.executable, "-m", module], environment=environment
        )
        names = [role.name] if count == 1 else [f"{role.name}-{number}" for number in range(1, count + 1)]
        services += [spec.model_copy(update={"name": name, "environment": dict(environment)}) for name in names]
        if role.scalable:
            templates[role.name] = spec
    console_url = ""
    if console and console_installed():
        console_port = next(filter(reserve, CONSOLE_PORTS), 0) or free_port()
        console_url = f"http://{LOOPBACK}:{console_port}/"
        passed_on = ("PYTHONPATH", "PYTHONUNBUFFERED", "RELAXD_HOST", "RELAXD_COORDINATOR", STACK_VARIABLE)
        environment = {name: common[name] for name in passed_on} | {"RELAXD_PORT": str(console_port)}
        command = [sys.executable, "-m", CONSOLE_MODULE]
        services.append(ServiceSpec(name=CONSOLE, role=CONSOLE, command=command, environment=environment))
    return StackPlan(
        state_folder=folder.path,
        coordinator=coordinator,
        stack=stack,
        console=console_url,
        redis=redis_url,
        redis_password_file=password_file,
        services=services,
        templates=templates,
        stop_with_parent=stop_with_parent,
        grace_seconds=grace_seconds + 2.0,  # a service ends by itself first
    )


def up(folder: StateFolder, plan: StackPlan, say: Callable[[str], None], logs: Path | None = None) -> StackState:
    """Start the supervisor and wait until every service has registered. Raises CliError after stopping everything.

    `logs`: folder whose logs are appended to; by default new logs are started in the state folder.
    """
    if folder.is_up():
        raise CliError(
            f"services are already up (in {folder.path})", "relaxd status shows them, relaxd down stops them"
        )
    folder.create()
    folder.begin_logs(logs)
    folder.plan.write_text(plan.model_dump_json(indent=2))
    with folder.log("supervisor").open("ab") as log_file:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "relaxd.local.supervisor", str(folder.plan)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=reservations(),  # the supervisor only keeps them open: services don't inherit them
            env=os.environ | {"PYTHONPATH": python_path()},
        )
    try:
        return _await_registration(folder, plan, supervisor, say)
    except BaseException:
        if supervisor.poll() is None:
            supervisor.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(timeout=ENDING_SECONDS)
        raise


def _await_registration(
    folder: StateFolder, plan: StackPlan, supervisor: "subprocess.Popen[bytes]", say: Callable[[str], None]
) -> StackState:
    wanted = Counter(spec.role for spec in plan.services if spec.role in REPLICA_ROLES)
    missing: list[str] = []
    deadline = time.monotonic() + READY_SECONDS
    with CoordinatorClient(plan.coordinator, plan.stack) as coordinator:
        while time.monotonic() < deadline:
            if supervisor.poll() is not None:
                raise failure(folder, "supervisor", "the services could not be started")
            state = folder.read()
            if state is not None and state.pid == supervisor.pid:
                raise_if_failed(folder, state)
                if any(service.phase == "starting" for service in state.services):
                    deadline = time.monotonic() + READY_SECONDS
                still_missing = list((wanted - _registered(coordinator)).elements())
                if not still_missing:
                    return state
                if still_missing != missing:
                    missing = still_missing
                    deadline = time.monotonic() + READY_SECONDS
                    say(f"waiting for {', '.join(missing)}")
            time.sleep(0.2)  # named: `say` tells which services are awaited
    late = ", ".join(missing) or "the supervisor"
    raise failure(folder, "supervisor", f"{late} did not come up in {READY_SECONDS:.0f} s")


def _registered(coordinator: CoordinatorClient) -> Counter[str]:
    try:
        replicas = coordinator.replicas()
    except CliError:
        return Counter()
    return Counter(replica.registration.role for replica in replicas)


def raise_if_failed(folder: StateFolder, state: StackState | None, roles: Collection[str] | None = None) -> None:
    """Raise CliError, with the end of the log, if the supervisor has given up a service (of `roles`, if given)."""
    failed = state.failed() if state else []
    for service in [service for service in failed if roles is None or service.role in roles]:
        raise failure(folder, service.name, f"{service.name} kept dying (exit code {service.exit_code})")


def raise_when_down(folder: StateFolder, address: str, run_id: str) -> Callable[[], None]:
    """Return a function that raises CliError once the folder's services, which a run at `address` uses, are down.

    Without this check, a caller would wait for a coordinator that has ended, or reach another one at the same port.
    """
    begun = folder.read()

    def check() -> None:
        if begun is None or begun.coordinator != address:
            return
        state = folder.read()
        if state is None or state.pid != begun.pid:
            problem = f"the services here are down, and run {run_id} had not ended"
            raise CliError(problem, "relaxd up and relaxd watch, or relaxd resume: the run goes on")

    return check


def failure(folder: StateFolder, service: str, message: str) -> CliError:
    """Return an error with `message` and the last lines of a service's log."""
    lines = "\n".join(f"  {line}" for line in folder.log_tail(service))
    shown = f"; the last lines of {folder.log(service)}:\n{lines}" if lines else ""
    return CliError(f"{message}{shown}", f"all logs are in {folder.logs}")


def down(folder: StateFolder, say: Callable[[str], None] = lambda text: None) -> bool:
    """Stop the folder's services. Returns False if no service was up. Raises CliError when they don't stop.

    `say` is called every few seconds with the services that have not stopped.
    """
    state = folder.read()
    if state is None:
        return False
    os.kill(state.pid, 15)
    deadline, told = time.monotonic() + DOWN_SECONDS, ""
    while not folder.wait_until_down(SAY_SECONDS):
        if time.monotonic() >= deadline:
            raise CliError(f"the supervisor (pid {state.pid}) does not stop", f"kill {state.pid}")
        left = [service.name for service in (folder.read() or state).services if service.phase != "stopped"]
        if left and (text := f"waiting for {', '.join(left)} to end") != told:
            say(told := text)
    return True


def address_here(state: Path, coordinator: str | None) -> str | None:
    """Return the coordinator's host:port: the given one, else that of the containers or services that this state
    folder records; None if none are up.

    There is no default address: another folder's services may use it. Raises CliError if the given one is no host:port.
    """
    if coordinator:
        try:
            return checked_address(coordinator)
        except ValueError as error:
            raise CliError(
                f"the coordinator's address is {coordinator!r}: it must be host:port",
                f"--coordinator {LOOPBACK}:{COORDINATOR_PORT}, or the variable RELAXD_COORDINATOR, names it",
            ) from error
    if containers := compose.use(StateFolder(state)):
        return containers.coordinator
    stack_state = use_stack(StateFolder(state).read())
    return stack_state.coordinator if stack_state else None


def use_stack(state: StackState | None) -> StackState | None:
    """Set an environment variable so that this process's calls carry the identity of the local stack, if any."""
    if state is not None and state.stack:
        os.environ[STACK_VARIABLE] = state.stack
    return state


def coordinator_address(state: Path, coordinator: str | None) -> str:
    """Return the coordinator's host:port, as `address_here` does. Raises CliError if no services are up here."""
    if address := address_here(state, coordinator):
        return address
    raise CliError(
        f"no services are up here (in {StateFolder(state).path})",
        "relaxd up starts them; --state DIR or --coordinator HOST:PORT names others",
    )
