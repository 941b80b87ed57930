"""A coordinator and its replicas as real processes that tests kill, freeze and inspect."""

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from relaxd.rpc.client import sync_channel
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.kit.ports import free_port
from tests.kit.processes import kill, start_python
from tests.kit.waiting import wait_until

LEASE_SECONDS = 3.0
GPU_LEASE_SECONDS = 8.0
PATIENCE = 120.0
"""Longest wait for what processes have to start for, in seconds."""
Result = TypeVar("Result")


class Cluster:
    """Processes of one test; `close` ends them all."""

    def __init__(self, folder: Path, redis_url: str, model: Path) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.model = model
        self.gpu_lease_seconds = GPU_LEASE_SECONDS
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.channel = sync_channel(f"127.0.0.1:{self.port}")
        self.stub = CoordinatorStub(self.channel)

    # --- processes

    def start(self, name: str, module: str, *arguments: str, **environment: str) -> None:
        """Start a process; its output goes to a file named after it."""
        flags = ["--redis", self.redis_url, "--grace-seconds", "2", "--replica-id", name, *arguments]
        log = self.folder / f"{name}.log"
        self.processes[name] = start_python("-m", *module.split(), *flags, log=log, environment=environment)

    def coordinator(self, name: str = "coordinator") -> None:
        leases = ("--lease-seconds", str(LEASE_SECONDS), "--gpu-lease-seconds", str(self.gpu_lease_seconds))
        self.start(name, "services.coordinator", "--port", str(self.port), *leases)

    def replica(self, name: str, module: str, faults: dict[str, dict[str, str]] | None = None, **env: str) -> None:
        self.start(
            name,
            module,
            *("--coordinator", f"127.0.0.1:{self.port}"),
            PEER_LOG=str(self.folder / f"{name}.calls"),
            PEER_FAULTS=json.dumps(faults or {}),
            **env,
        )

    def rollout(self, name: str, faults: dict[str, dict[str, str]] | None = None, **env: str) -> None:
        self.replica(name, "tests.integration.peers rollout", faults, **env)

    def trainer(self, name: str = "trainer", faults: dict[str, dict[str, str]] | None = None, **env: str) -> None:
        self.replica(name, "tests.integration.peers trainer", faults, **env)

    def judges(self) -> None:
        """Start the real reward and advantage services."""
        self.replica("reward", "services.reward")
        self.replica("advantage", "services.advantage")

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.send(name, signal.SIGKILL)
        self.processes.pop(name).wait()

    def close(self) -> None:
        self.channel.close()
        kill(*self.processes.values())

    # --- looking

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def calls(self, name: str, method: str | None = None) -> list[dict[str, Any]]:
        """Return the calls that a double received, in order."""
        path = self.folder / f"{name}.calls"
        lines = path.read_text().splitlines() if path.exists() else []
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if method in (None, call["method"])]

    def until(self, what: str, look: Callable[[], Result], seconds: float = PATIENCE) -> Result:
        """Wait until `look` returns something true; errors of an unavailable coordinator count as false."""

        def explain() -> str:
            run = ""
            with contextlib.suppress(grpc.RpcError):
                run = str(self.run())
            return "\n".join([run, *(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.processes)])

        def look_while_it_lives() -> Result:
            coordinator = self.processes.get("coordinator")
            if coordinator is None or coordinator.poll() is None:
                return look()
            with contextlib.suppress(grpc.RpcError):
                if found := look():
                    return found
            raise AssertionError(f"{what}: the coordinator has ended\n{explain()}")

        return wait_until(look_while_it_lives, what, seconds, forgive=(grpc.RpcError,), explain=explain)

    def run(self, run_id: str = "") -> pb.Run:
        return self.stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=20).run

    def until_state(self, state: "pb.RunState.ValueType", seconds: float = PATIENCE) -> pb.Run:
        """Wait for a state of the newest run."""
        name = pb.RunState.Name(state)
        return self.until(name, lambda: (run := self.run()).state == state and run, seconds)

    def until_step(self, step: int, seconds: float = PATIENCE) -> pb.Run:
        return self.until(f"step {step}", lambda: (run := self.run()).step >= step and run, seconds)

    # --- asking

    def config(self, **overrides: Any) -> str:
        """Return a run's configuration as TOML; overrides as section__key=value."""
        values: dict[str, dict[str, Any]] = {
            "run": {"steps": 4, "folder": str(self.folder / "runs")},
            "model": {"path": str(self.model)},
            "data": {"source": "addition"},
            "rollout": {"samples_per_prompt": 4, "max_new_tokens": 8},
            "reward": {"name": "addition"},
            "algorithm": {"drop_zero_variance": False},
            "trainer": {"groups_per_step": 4},
            "weights": {"timeout_seconds": 30.0, "connect_timeout_seconds": 20.0},
            "board": {"lease_seconds": 4.0},
        }
        for place, value in overrides.items():
            section, key = place.split("__")
            values.setdefault(section, {})[key] = value
        lines = []
        for section, settings in values.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        return "\n".join(lines)

    def start_run(self, run_id: str = "", **overrides: Any) -> pb.Run:
        request = pb.StartRunRequest(run_id=run_id, config_toml=self.config(**overrides))
        return self.stub.StartRun(request, timeout=60).run

    def start_when_up(self, run_id: str, **overrides: Any) -> pb.Run:
        """`start_run` as soon as the coordinator answers."""
        self.until("the coordinator", lambda: self.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)
        return self.start_run(run_id, **overrides)
