"""What is attacked: every service as real processes, in two clusters on one Redis.

In the first a tiny model is trained for a step and then paused: its rollout, trainer, reward and advantage services
have an engine, ranks, workers and a board, and its coordinator is left alone, so that the run can go on when the attack
is over. In the second are a coordinator of its own, with a run that nobody works on, a launcher, and a replica that
waits to be asked (--standby).
"""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil

from relaxd.rpc.client import sync_channel
from relaxd.telemetry.logs import INDENT
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.kit.models import make_tiny_model
from tests.kit.ports import free_port
from tests.kit.processes import kill, start_python
from tests.kit.redis.redis_server import RedisServer
from tests.kit.waiting import wait_until

PATIENCE = 180.0
RUN_ID = "run-1"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Target:
    """A process, and the services of it that are attacked."""

    name: str
    address: str
    services: tuple[str, ...]


class Fleet:
    """The processes. `close` ends them."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """Start everything; `arguments` go to every process."""
        self.folder = folder
        self._arguments = arguments
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._channels: dict[str, grpc.Channel] = {}
        (folder / "redis").mkdir()
        self.redis = RedisServer(folder / "redis").start()
        self.model = make_tiny_model(folder / "model")
        ports = {name: free_port() for name in ("coordinator", "rollout", "trainer", "reward", "advantage", "judge")}
        ports |= {name: free_port() for name in ("victim", "launcher", "standby")}
        self.ports = ports
        try:
            self._start("coordinator", "services.coordinator", "--redis", self.redis_url(0), "--lease-seconds", "60")
            for role in ("rollout", "trainer", "reward", "advantage"):
                to_coordinator = ("--coordinator", f"127.0.0.1:{ports['coordinator']}")
                self._start(role, f"services.{role}", "--redis", self.redis_url(0), *to_coordinator)
            self._start("judge", "services.rollout.judge", "--redis", self.redis_url(0), *to_coordinator)
            self._start("launcher", "tests.fuzz.launcher", "--redis", self.redis_url(1))
            to_launcher = ("--launcher", f"127.0.0.1:{ports['launcher']}")
            self._start(
                *("victim", "services.coordinator", "--redis", self.redis_url(1), "--lease-seconds", "20"), *to_launcher
            )
            to_victim = ("--coordinator", f"127.0.0.1:{ports['victim']}")
            self._start(*("standby", "services.reward", "--redis", self.redis_url(1), *to_victim), "--standby", "true")
            self.coordinator = CoordinatorStub(self.channel("coordinator"))
            self._train_a_step()
        except BaseException:
            self.close()
            raise

    def redis_url(self, database: int) -> str:
        return self.redis.url.removesuffix("/0") + f"/{database}"

    def channel(self, name: str) -> grpc.Channel:
        """The channel to a service: one, or its connections would be taken for a leak of the service."""
        if name not in self._channels:
            self._channels[name] = sync_channel(f"127.0.0.1:{self.ports[name]}", term=1)
        return self._channels[name]

    @property
    def targets(self) -> list[Target]:
        """What is attacked, and where."""
        return [
            Target(name, f"127.0.0.1:{self.ports[name]}", services)
            for name, services in (
                ("victim", ("relaxd.v1.Coordinator", "relaxd.v1.Replica")),
                ("rollout", ("relaxd.v1.Rollout",)),
                ("trainer", ("relaxd.v1.Trainer",)),
                ("reward", ("relaxd.v1.Reward",)),
                ("advantage", ("relaxd.v1.Advantage",)),
                ("judge", ("relaxd.v1.Judge",)),
                ("launcher", ("relaxd.v1.Launcher",)),
                ("standby", ("relaxd.v1.Replica",)),
            )
        ]

    @property
    def attacked(self) -> list[str]:
        return [target.name for target in self.targets]

    def config(self, folder: str = "runs") -> str:
        """A run that does a little and then waits to be resumed."""
        values: dict[str, dict[str, Any]] = {
            "run": {"steps": 1_000_000, "folder": str(self.folder / folder)},
            "model": {"path": str(self.model)},
            "data": {"source": "addition"},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8, "threads": 1, "max_running_samples": 16},
            "reward": {"name": "addition", "workers": 1},
            "roles": {"judge": {"model": str(self.model), "max_new_tokens": 8, "threads": 1}},
            "algorithm": {"drop_zero_variance": False},
            "trainer": {"groups_per_step": 2, "threads": 1, "checkpoint": {"every": 0}},
            "weights": {"timeout_seconds": 20.0, "bucket_bytes": 1 << 20},
            "board": {"max_consecutive_drops": 10**6},
        }
        lines = []
        for section, settings in values.items():
            lines.append(f"[{section}]")
            plain = {key: value for key, value in settings.items() if not isinstance(value, dict)}
            lines += [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
            for key, value in settings.items():
                if isinstance(value, dict):
                    lines.append(f"[{section}.{key}]")
                    lines += [f"{name} = {json.dumps(setting)}" for name, setting in value.items()]
        return "\n".join(lines)

    def run(self) -> pb.Run:
        """The run that is trained."""
        return self.coordinator.GetRun(pb.GetRunRequest(run_id=RUN_ID), timeout=20).run

    def until(self, what: str, look: Callable[[], Result], seconds: float = PATIENCE) -> Result:
        """Wait for something; calls that fail meanwhile count as "not yet"."""

        def explain() -> str:
            return "\n".join(f"--- {name}\n{self.log(name)}" for name in self.processes)

        def look_while_all_live() -> Result:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended with {process.returncode}\n{self.log(name)}"
            return look()

        return wait_until(look_while_all_live, what, seconds, forgive=(grpc.RpcError,), explain=explain)

    def goes_on(self) -> int:
        """Resume the run and wait for its next step; returns the step."""
        before = self.run().step
        self.until("resumed", lambda: self.coordinator.ResumeRun(pb.ResumeRunRequest(run_id=RUN_ID), timeout=10))
        return self.until(f"a step after {before}", lambda: (step := self.run().step) > before and step)

    def wake(self) -> None:
        """Wake up what was put to sleep."""
        engine = rollout_pb2_grpc.RolloutStub(self.channel("rollout"))
        trainer = trainer_pb2_grpc.TrainerStub(self.channel("trainer"))
        parts = [rollout_pb2.MEMORY_PART_WEIGHTS, rollout_pb2.MEMORY_PART_KEY_VALUE_CACHE]

        def wake_trainer() -> object:
            request = trainer_pb2.TrainerWakeRequest(sync_id=_now(), timeout_seconds=30)
            return trainer.Wake(request, timeout=40)

        def wake_engine() -> object:
            request = rollout_pb2.WakeRequest(sync_id=_now(), timeout_seconds=30, parts=parts)
            return engine.Wake(request, timeout=40)

        self.until("the trainer is awake", wake_trainer)
        self.until("the engine is awake", wake_engine)

    def pause(self) -> None:
        """Let the run rest, so that it costs no time."""
        self.coordinator.PauseRun(pb.PauseRunRequest(run_id=RUN_ID, reason="under attack"), timeout=20)

    def alive(self) -> None:
        """Raise AssertionError for a process that ended, or answers no health check."""
        for name in self.processes:
            assert self.processes[name].poll() is None, f"{name} ended: {self.log(name)}"

    def pids(self, name: str) -> list[int]:
        """A service's process and its children."""
        process = psutil.Process(self.processes[name].pid)
        return [process.pid, *sorted(child.pid for child in process.children(recursive=True))]

    def resources(self) -> dict[str, tuple[int, int, int]]:
        """By name: resident bytes and open files of the service's own process, and processes below it.

        Connections to Redis don't count: a coordinator keeps some for each of the last runs (see `redis_connections`).
        """
        self.alive()
        found = {}
        for name in self.attacked:
            process = psutil.Process(self.processes[name].pid)
            files = process.num_fds() - self.redis_connections(name)
            found[name] = (process.memory_info().rss, files, len(process.children(recursive=True)))
        return found

    def redis_connections(self, name: str) -> int:
        """Count a service's connections to Redis."""
        connections = psutil.Process(self.processes[name].pid).net_connections()
        return sum(bool(one.raddr) and one.raddr.port == self.redis.port for one in connections)

    def bugs(self) -> list[str]:
        """What the services logged about handlers, tasks and threads that failed: where, and why."""
        found = [
            f"{name}: {bug}"
            for name in self.processes
            for bug in bugs_in((self.folder / f"{name}.log").read_text(errors="replace"))
        ]
        # gRPC itself, when a caller has gone away in the moment in which it is answered.
        return [bug for bug in dict.fromkeys(found) if "ExecuteBatchError" not in bug]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
        kill(*self.processes.values())
        self.redis.kill()

    def _start(self, name: str, module: str, *arguments: str) -> None:
        common = ("--port", str(self.ports[name]), "--replica-id", name, "--log-level", "warning", *self._arguments)
        log = self.folder / f"{name}.log"
        self.processes[name] = start_python("-m", module, *arguments, *common, log=log, clean=True)

    def _train_a_step(self) -> None:
        up = lambda: self.coordinator.ListRuns(pb.ListRunsRequest(), timeout=5) is not None  # noqa: E731
        self.until("the coordinator", up)
        request = pb.StartRunRequest(run_id=RUN_ID, config_toml=self.config())
        self.coordinator.StartRun(request, timeout=30)
        self.until("a step", lambda: self.run().step >= 1)
        self.pause()
        victim = CoordinatorStub(self.channel("victim"))
        self.until("the victim", lambda: victim.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)
        victim.StartRun(pb.StartRunRequest(run_id=RUN_ID, config_toml=self.config("victim")), timeout=30)


def _now() -> int:
    """The number of a turn that comes after all others so far, as the coordinator counts them."""
    return int(time.time() * 1000)


def bugs_in(log: str) -> list[str]:
    """Find failures in a service's log: exceptions, and messages of Python and the system about failures."""
    found = []
    lines = iter(log.splitlines())
    for line in lines:
        if "Traceback" in line:
            found.append(_what_failed(line, lines))
        elif any(word in line for word in ("never awaited", "Fatal Python", "Segmentation")):
            found.append(line[:300])
    return found


def _what_failed(first: str, lines: Iterator[str]) -> str:
    """The exception at the end of a traceback, and of those that follow from it, and where it was raised.

    Returns everything that was logged where no line reads as an exception: nothing is left out unread.
    """
    inside = failed = ""
    read = [first]
    for line in lines:
        if line.startswith("20"):  # the next entry of the log
            break
        read.append(line)
        line = line.removeprefix(INDENT)  # of the further lines of an entry
        if line.lstrip().startswith("File "):
            inside = line.strip()
        elif re.match(r"[A-Za-z_][\w.]*(: |$)", line) and not line.startswith(("During", "The above", "Traceback")):
            failed = f"{line[:300]} {inside}"
    return failed or "\n".join(read)[-2000:]


@contextlib.contextmanager
def fleet(folder: Path, *arguments: str) -> Iterator[Fleet]:
    """A fleet that ends with the block."""
    started = Fleet(folder, *arguments)
    try:
        yield started
    finally:
        started.close()
