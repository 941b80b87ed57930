"""The supervisor: starts services as child processes, restarts dead ones, stops all in order.

`relaxd up` starts it as a separate process (`python -m relaxd.local.supervisor PLAN.json`). It has one thread, because
children are forked with a parent-death signal, which is tied to the forking thread.

It limits the restarts of services that die (max_restarts). Restarts that the coordinator requests, through the service
itself (exit code RESTART) or the launcher, are limited by the coordinator ([health] in the run's configuration). They
don't count here, and also start a service that exceeded its restarts.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from relaxd.client import CliError
from relaxd.local import embedded_redis
from relaxd.local.embedded_redis import RedisUrlModel
from relaxd.local.state_folder import LaunchWish, LaunchWishes, Phase, ServiceState, StackState, StateFolder
from relaxd.replica import RESTART
from relaxd.waiting import Backoff, waiting

PR_SET_PDEATHSIG = 1
MAX_BACKOFF_SECONDS = 10.0


class ServiceSpec(BaseModel):
    """A service that the supervisor keeps running as a child process."""

    name: str
    role: str
    command: list[str]
    environment: dict[str, str] = {}
    """Environment variables of the process, in addition to the supervisor's."""


class StackPlan(RedisUrlModel):
    """Plan of a supervisor: the services that it runs, and how."""

    state_folder: Path
    coordinator: str
    """Address of the coordinator, host:port."""
    stack: str = ""
    """Identity of the stack that the services belong to (relaxd.rpc.stack_identity)."""
    console: str = ""
    """URL of the console; empty if there is none."""
    services: list[ServiceSpec]
    """Services in the order of starting. The coordinator and then Redis are stopped last."""
    templates: dict[str, ServiceSpec] = Field(default_factory=dict)
    """Templates, by role, of the replicas that the launcher adds."""
    stop_with_parent: bool = False
    """True to stop all services when the process that started the supervisor ends."""
    grace_seconds: float = 20.0
    """Maximum seconds for a service to drain; after them it is killed."""
    max_restarts: int = 5
    """Maximum number of a service's deaths within restart_window_seconds. Beyond it the service isn't restarted."""
    restart_window_seconds: float = 60.0
    first_backoff_seconds: float = 0.5
    """Seconds before a service's first restart, doubled for each further restart."""


class SupervisedProcess:
    """A service of the supervisor, with its current process and the times of its recent deaths."""

    def __init__(self, spec: ServiceSpec, log: Path, *, launched: bool = False) -> None:
        self.spec = spec
        self.log = log
        self.state = ServiceState(name=spec.name, role=spec.role, launched=launched)
        self.kill_at: float | None = None
        """Monotonic time at which the stopping process is killed; None while the process isn't being stopped."""
        self.process: subprocess.Popen[bytes] | None = None
        self.restart_at: float | None = None
        self.deaths: deque[float] = deque()
        self.asked_to_restart = False
        """True while the process is being killed for a restart that the coordinator requested."""

    @property
    def replica_id(self) -> str:
        """Replica id that the service's newest process has."""
        return self.spec.name + (f"-r{self.state.restarts}" if self.state.restarts else "")

    def start(self) -> None:
        """Start the process in a new session, which Ctrl-C in the terminal doesn't reach."""
        environment = os.environ | self.spec.environment
        # A restarted process is a new replica: it does not continue with the groups that the dead one held.
        environment["RELAXD_REPLICA_ID"] = self.replica_id
        environment["RELAXD_INSTANCE"] = self.spec.name
        environment["RELAXD_LOG"] = str(self.log.resolve())  # for messages that name it
        self.restart_at = None
        try:
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(
                    self.spec.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_prepare,
                )
        except OSError as error:
            raise CliError(f"cannot start {self.spec.name}: {error}") from error
        self.set_phase("running")

    def set_phase(self, phase: Phase) -> None:
        """Set phase and pid in the service's state."""
        self.state.phase = phase
        self.state.pid = self.process.pid if self.process else None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process. SIGKILL goes to its whole process group."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def reap(self) -> bool:
        """Return True if the process has ended since the last call, and kill its remaining children."""
        if self.process is None or self.process.poll() is None:
            return False
        self.signal(signal.SIGKILL)
        self.state.exit_code = self.process.returncode
        self.process = None
        return True


class Supervisor:
    """Starts the services of one plan, restarts dead ones, and stops all at the end."""

    def __init__(self, plan: StackPlan) -> None:
        self.plan = plan
        self.folder = StateFolder(plan.state_folder)
        self.children = [SupervisedProcess(spec, self.folder.log(spec.name)) for spec in plan.services]
        self.started = time.time()
        self.stopping = False
        self._stop_signals = 0
        self._parent = os.getppid()
        self._wakeup_reader, self._wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Run the services until SIGTERM or SIGINT, then stop them; a second signal kills them."""
        self.folder.create()
        with self.folder.locked():
            self.folder.write_launched(LaunchWishes())
            self._handle_signals()
            try:
                self._start()
                while not self.stopping:
                    self._watch()
                    self._wait(0.5)
            finally:
                self._stop()

    def _start(self) -> None:
        for child in self.children:
            if self.stopping:
                return
            child.start()
            if child.spec.role == "redis":
                child.set_phase("starting")
            self._say(f"started {child.spec.name} (pid {child.state.pid})")
            self._write()
            if child.spec.role == "redis":
                self._await_redis(child)
                child.set_phase("running")
                self._write()

    def _await_redis(self, child: SupervisedProcess) -> None:
        def ended() -> bool:
            return child.process is None or child.process.poll() is not None or self.stopping

        with waiting("Redis to load its data", on=child.spec.name):
            embedded_redis.wait_until_up(self.plan.redis, ended=ended)  # no deadline: it may have much data to load

    def _watch(self) -> None:
        now = time.monotonic()
        self._follow_launcher(now)
        for child in list(self.children):
            if child.reap():
                self._after_death(child, now)
                self._write()
            elif child.kill_at is not None:
                if now >= child.kill_at:
                    self._say(f"{child.spec.name} did not stop within its grace period: killing it")
                    child.signal(signal.SIGKILL)
                    child.kill_at = float("inf")
            elif child.restart_at is not None and now >= child.restart_at:
                child.state.restarts += 1
                child.start()
                self._say(f"restarted {child.spec.name} (pid {child.state.pid}, restart {child.state.restarts})")
                self._write()
        if self.plan.stop_with_parent and os.getppid() != self._parent:
            self._say("the process that started the services is gone: stopping them")
            self.stopping = True

    def _follow_launcher(self, now: float) -> None:
        """Execute the launcher's new requests to launch, stop or restart a replica."""
        launched = {child.spec.name: child for child in self.children if child.state.launched}
        for launch_id, wish in self.folder.read_launched().wishes.items():
            child = launched.get(launch_id)
            if child is None and wish.stop_seconds is None:
                self._launch(launch_id, wish)
            elif child is not None and wish.stop_seconds is not None and child.kill_at is None:
                child.restart_at, child.kill_at = None, now + wish.stop_seconds
                child.signal(signal.SIGTERM)
                if child.process is None:
                    self._forget(child)
        for name, restart in self.folder.read_launched().restarts.items():
            child = next((child for child in self.children if child.spec.name == name), None)
            if child is not None and child.state.restart_wish < restart.number:
                child.state.restart_wish = restart.number
                self._restart(child, restart.replica_id, now)
                self._write()

    def _restart(self, child: SupervisedProcess, replica_id: str, now: float) -> None:
        """Restart a service on request of the coordinator."""
        if child.kill_at is not None:
            return  # it is being stopped
        if child.process is None:
            self._say(f"the coordinator requests a start of {child.spec.name}")
            child.deaths.clear()
            child.restart_at = now
        elif replica_id in ("", child.replica_id):
            self._say(f"the coordinator requests a restart of {child.spec.name}: killing it")
            child.deaths.clear()
            child.asked_to_restart = True
            child.signal(signal.SIGKILL)

    def _launch(self, launch_id: str, wish: LaunchWish) -> None:
        template = self.plan.templates[wish.role]
        environment = {**template.environment, "RELAXD_LAUNCH_ID": launch_id}
        if wish.gpu_uuids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(wish.gpu_uuids)
        if wish.sglang_url:
            environment["RELAXD_SGLANG_URL"] = wish.sglang_url
        spec = template.model_copy(update={"name": launch_id, "environment": environment})
        child = SupervisedProcess(spec, self.folder.log(launch_id), launched=True)
        child.start()
        self.children.append(child)
        self._say(f"launched {launch_id} (pid {child.state.pid})")
        self._write()

    def _forget(self, child: SupervisedProcess) -> None:
        self.children.remove(child)
        self._say(f"removed {child.spec.name}")
        self._write()

    def _after_death(self, child: SupervisedProcess, now: float) -> None:
        if child.kill_at is not None:
            self._forget(child)
            return
        if child.asked_to_restart or child.state.exit_code == RESTART:
            child.asked_to_restart = False
            child.restart_at = now + self.plan.first_backoff_seconds
            child.set_phase("restarting")
            self._say(f"{child.spec.name} {_describe_exit(child.state.exit_code)}, as requested; restarting it")
            return
        while child.deaths and now - child.deaths[0] > self.plan.restart_window_seconds:
            child.deaths.popleft()
        child.deaths.append(now)
        how = _describe_exit(child.state.exit_code)
        if len(child.deaths) > self.plan.max_restarts:
            child.set_phase("failed")
            count, seconds = len(child.deaths), self.plan.restart_window_seconds
            self._say(f"{child.spec.name} {how}; it died {count} times within {seconds:.0f} s: not restarting it")
            return
        pause = Backoff(self.plan.first_backoff_seconds, MAX_BACKOFF_SECONDS).pause(len(child.deaths))
        child.restart_at = now + pause
        child.set_phase("restarting")
        self._say(f"{child.spec.name} {how}; restarting it in {pause:.1f} s")

    def _stop(self) -> None:
        self.stopping = True
        self._say("stopping")
        self._write()
        # Replicas hand their groups back while coordinator and Redis still run.
        last = {"coordinator": 1, "redis": 2}
        for turn in range(3):
            self._stop_children([child for child in self.children if last.get(child.spec.role, 0) == turn])
        self._say("stopped")

    def _stop_children(self, children: Sequence[SupervisedProcess]) -> None:
        for child in children:
            child.restart_at = None
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.plan.grace_seconds
        asked = self._stop_signals
        while any(child.process is not None for child in children):
            for child in children:
                if child.reap():
                    child.set_phase("stopped")
                    self._write()  # `relaxd down` says what it waits for
            if time.monotonic() >= deadline or self._stop_signals > max(asked, 1):
                for child in children:
                    if child.process is not None:
                        self._say(f"{child.spec.name} did not stop within its grace period: killing it")
                        child.signal(signal.SIGKILL)
                deadline = float("inf")
                asked = self._stop_signals
            self._wait(0.1)
        self._write()

    def _handle_signals(self) -> None:
        def on_stop(number: int, frame: object) -> None:
            self._stop_signals += 1
            self.stopping = True

        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, on_stop)
        signal.signal(signal.SIGINT, on_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes up _wait

    def _wait(self, seconds: float) -> None:
        """Sleep for `seconds` or until a signal arrives; return at once if one arrived since the last call."""
        if select.select([self._wakeup_reader], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup_reader, 4096)

    def _write(self) -> None:
        self.folder.write(
            StackState(
                pid=os.getpid(),
                started=self.started,
                coordinator=self.plan.coordinator,
                stack=self.plan.stack,
                console=self.plan.console,
                redis=self.plan.redis,
                redis_password_file=self.plan.redis_password_file,
                stopping=self.stopping,
                services=[child.state for child in self.children],
            )
        )

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} supervisor {text}", flush=True)


def _prepare() -> None:
    """Prepare a forked child: the kernel ends it when the supervisor dies.

    SIGXFSZ is ignored so that a write beyond a file-size limit fails with an error, which Redis can handle.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def main() -> None:
    """Run the supervisor with the plan file that the command line names."""
    plan = StackPlan.model_validate_json(Path(sys.argv[1]).read_bytes())
    try:
        Supervisor(plan).run()
    except CliError as error:
        print(f"supervisor: {error.message}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
