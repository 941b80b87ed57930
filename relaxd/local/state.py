"""The state folder (.relaxd/): what `relaxd up` started, so that other commands find it."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from relaxd.client.errors import CliError
from relaxd.local.redis_address import RedisAddress

Phase = Literal["starting", "running", "restarting", "failed", "stopped"]


class ServiceState(BaseModel):
    """One child process of the supervisor."""

    name: str
    """Such as rollout-2."""
    role: str
    """coordinator, trainer, rollout, reward, advantage, launcher or redis."""
    phase: Phase = "starting"
    pid: int | None = None
    restarts: int = 0
    exit_code: int | None = None
    """How it ended last; negative is the signal that ended it."""
    launched: bool = False
    """Scaled out; not one of those that the stack began with."""
    restart_wish: int = 0
    """Number of the last RestartWish that was followed."""


class StackState(RedisAddress):
    """Everything that one supervisor runs."""

    pid: int
    """The supervisor's."""
    started: float
    """Unix time."""
    coordinator: str
    """host:port."""
    stopping: bool = False
    services: list[ServiceState] = Field(default_factory=list)

    def failed(self) -> list[ServiceState]:
        """The services that the supervisor gave up on, of those that the stack began with."""
        return [service for service in self.services if service.phase == "failed" and not service.launched]


class LaunchWish(BaseModel):
    """A replica that the launcher wants to have, or to be rid of."""

    role: str
    gpu_uuids: list[str] = []
    """The GPUs that it may see; empty: all."""
    stop_seconds: float | None = None
    """Set: it has to go, and may take so long to end by itself."""


class RestartWish(BaseModel):
    """A process that the launcher wants to have killed and started again."""

    number: int
    """Ascends with each wish for this service."""
    replica_id: str
    """The process; one of another id is left alone. Empty: whatever runs."""


class LaunchWishes(BaseModel):
    """What the launcher wants, by launch id or name. It alone writes them, and the supervisor follows."""

    wishes: dict[str, LaunchWish] = {}
    restarts: dict[str, RestartWish] = {}


class StateFolder:
    """A folder that at most one supervisor uses at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.logs = self.path / "logs"
        self.redis_data = self.path / "redis"
        self.redis_password = self.path / "redis_password"
        self.plan = self.path / "plan.json"
        self._state = self.path / "state.json"
        self._launched = self.path / "launched.json"
        self._lock = self.path / "lock"

    def create(self) -> None:
        """Make the folder. Raises CliError when that isn't possible."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.path / ".gitignore").write_text("*\n")
        except OSError as error:
            problem = f"cannot write the state folder {self.path}: {error.strerror}"
            raise CliError(problem, "choose another: --state DIR") from error

    def log(self, service: str) -> Path:
        """Where a service's output goes."""
        return self.logs / f"{service}.log"

    def log_tail(self, service: str, lines: int = 15) -> list[str]:
        """The last lines of a service's log."""
        path = self.log(service)
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-lines:]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one supervisor. Raises CliError when another holds it."""
        with self._lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CliError(f"{self.path} is in use: services are already up", "relaxd down stops them") from error
            yield

    def is_up(self) -> bool:
        """Whether a supervisor holds the folder."""
        if not self._lock.exists():
            return False
        with self._lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def read(self) -> StackState | None:
        """What the supervisor last wrote; None when no supervisor runs."""
        if not self.is_up():
            return None
        try:
            return StackState.model_validate_json(self._state.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, state: StackState) -> None:
        """Replace the state."""
        _replace(self._state, state)

    def read_launched(self) -> LaunchWishes:
        """What the launcher wants."""
        try:
            return LaunchWishes.model_validate_json(self._launched.read_bytes())
        except FileNotFoundError:
            return LaunchWishes()

    def write_launched(self, wishes: LaunchWishes) -> None:
        """Replace what the launcher wants."""
        _replace(self._launched, wishes)

    def wait_until_down(self, seconds: float) -> bool:
        """Wait until no supervisor holds the folder; False when that takes longer."""
        deadline = time.monotonic() + seconds
        while self.is_up():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True


def _replace(path: Path, content: BaseModel) -> None:
    """Write a file at once, so that readers never see half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(content.model_dump_json(indent=2))
    os.replace(temporary, path)
