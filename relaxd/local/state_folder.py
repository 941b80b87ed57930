"""The state folder (.relaxd/), by which commands find the services that `relaxd up` started."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from relaxd.client import CliError
from relaxd.local.embedded_redis import RedisUrlModel
from relaxd.run_folder import replace_file

CONSOLE = "console"
"""Name and role of the console's process."""
Phase = Literal["starting", "running", "restarting", "failed", "stopped"]


class ServiceState(BaseModel):
    """State of one child process of the supervisor."""

    name: str
    """Name of the service, such as rollout-2."""
    role: str
    """Role of the service: one of relaxd.roles, "launcher", "console" or "redis"."""
    phase: Phase = "starting"
    pid: int | None = None
    restarts: int = 0
    exit_code: int | None = None
    """Exit code of the service's last process. If a signal killed the process: the signal's number, negative."""
    launched: bool = False
    """True if the service was added at the launcher's request."""
    restart_wish: int = 0
    """Number of the last RestartWish that the supervisor executed for this service."""


class StackState(RedisUrlModel):
    """State of a supervisor and its services, which the supervisor writes for other commands."""

    pid: int
    """Pid of the supervisor."""
    started: float
    """Time at which the supervisor started, in Unix time (seconds)."""
    coordinator: str
    """Address of the coordinator, host:port."""
    stack: str = ""
    """Identity of the stack (relaxd.rpc.stack_identity); empty if an earlier release started it."""
    console: str = ""
    """URL of the console; empty if there is none."""
    stopping: bool = False
    services: list[ServiceState] = Field(default_factory=list)

    def failed(self) -> list[ServiceState]:
        """Return the services that the supervisor no longer restarts, except launched ones and the console: runs
        continue without them."""
        failed = [service for service in self.services if service.phase == "failed"]
        return [service for service in failed if not service.launched and service.role != CONSOLE]


class LaunchWish(BaseModel):
    """The launcher's request to start or stop a replica."""

    role: str
    gpu_uuids: list[str] = []
    """UUIDs of the GPUs that the service may see; empty: all."""
    sglang_url: str = ""
    stop_seconds: float | None = None
    """Seconds after which the stopping replica is killed; None: the replica is to be started, not stopped."""


class RestartWish(BaseModel):
    """The launcher's request to restart a service's process."""

    number: int
    """Number of the restart request, which grows with each request for the same service."""
    replica_id: str
    """Replica id of the process to restart; the request is ignored if another process runs. Empty: any process."""


class LaunchWishes(BaseModel):
    """The launcher's requests to the supervisor: launches by launch id, restarts by name of the service."""

    wishes: dict[str, LaunchWish] = {}
    restarts: dict[str, RestartWish] = {}


class StateFolder:
    """The folder with the state and the logs of a stack on this machine. At most one supervisor uses it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.logs = self.path / "logs"
        """Folder of the services' logs. If the services serve a single run, a link to a folder of the run."""
        self.redis_data = self.path / "redis"
        """Data and password of the embedded Redis. Rewards need nothing in this folder, so the reward service's
        worker_enclosure.py keeps their workers out of it."""
        self.redis_password = self.redis_data / "password"
        self.plan = self.path / "plan.json"
        self._state = self.path / "state.json"
        self._launched = self.path / "launched.json"
        self._lock = self.path / "lock"
        self._starting = self.path / "starting.lock"

    def create(self) -> None:
        """Create the state folder and its subfolders. Raises CliError when that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.logs.is_symlink():  # else they are a run's, whose folder may be gone
                self.logs.mkdir(exist_ok=True)
            self.redis_data.mkdir(exist_ok=True)
            self.redis_data.chmod(0o700)
            (self.path / ".gitignore").write_text("*\n")
        except OSError as error:
            problem = f"cannot write the state folder {self.path}: {error.strerror}"
            raise CliError(problem, "choose another: --state DIR") from error

    def begin_logs(self, target: Path | None = None) -> None:
        """Start empty logs in the state folder, or continue the logs in `target`, a run's folder. Raises CliError."""
        try:
            if self.logs.is_symlink():
                self.logs.unlink()
            if target is not None:
                target.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(self.logs, ignore_errors=True)
                self.logs.symlink_to(target)
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CliError(f"cannot write logs to {target or self.logs}: {error.strerror}") from error
        if target is None:
            for log in self.logs.glob("*.log"):
                log.unlink()

    def redis_data_of(self, run_id: str) -> Path:
        """Return the data folder of a Redis that serves a single run."""
        return self.redis_data / f"run-{run_id}"

    def log(self, service: str) -> Path:
        """Return the path of a service's log file."""
        return self.logs / f"{service}.log"

    def log_tail(self, service: str, lines: int = 15) -> list[str]:
        """Return the last lines of a service's log."""
        path = self.log(service)
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace").rstrip("\n")
        return text.split("\n")[-lines:] if text else []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the state folder for one supervisor. Raises CliError if another supervisor holds the lock."""
        with self._lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CliError(f"{self.path} is in use: services are already up", "relaxd down stops them") from error
            yield

    @contextmanager
    def starting(self, command: str) -> Iterator[None]:
        """Lock the state folder for a command that starts services. Enter before writing anything there.

        Raises CliError, which names the holder, if another command starts services or services are up.
        """
        self.create()
        with self._starting.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read().strip() or "another command"
                raise CliError(
                    f"{self.path} is in use by {holder}", "wait until that has ended, or use another one: --state DIR"
                ) from error
            if self.is_up():
                state = self.read()
                pid = f", by the supervisor with pid {state.pid}" if state else ""
                raise CliError(
                    f"services are already up (in {self.path}{pid})",
                    "relaxd status shows them, relaxd run uses them, relaxd down stops them",
                )
            file.truncate(0)
            file.write(f"`{command}` (pid {os.getpid()}, since {time.strftime('%H:%M:%S')})")
            file.flush()
            yield

    def is_up(self) -> bool:
        """Return True if a supervisor holds the state folder's lock."""
        if not self._lock.exists():
            return False
        with self._lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def read(self) -> StackState | None:
        """Read the supervisor's state; None if no supervisor runs."""
        if not self.is_up():
            return None
        try:
            return StackState.model_validate_json(self._state.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, state: StackState) -> None:
        """Write the supervisor's state."""
        replace_file(self._state, state.model_dump_json(indent=2))

    def read_launched(self) -> LaunchWishes:
        """Read the launcher's requests to the supervisor."""
        try:
            return LaunchWishes.model_validate_json(self._launched.read_bytes())
        except FileNotFoundError:
            return LaunchWishes()

    def write_launched(self, wishes: LaunchWishes) -> None:
        """Write the launcher's requests to the supervisor."""
        replace_file(self._launched, wishes.model_dump_json(indent=2))

    def wait_until_down(self, seconds: float) -> bool:
        """Wait until no supervisor holds the state folder's lock. Returns False if one still does after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.is_up():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)  # named: `stack.down` tells which services are awaited
        return True
