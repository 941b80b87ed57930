"""A compose project of a test's own: containers, and a coordinator to ask."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from unittest.mock import patch

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local import compose
from relaxd.local.state_folder import StateFolder
from relaxd.v1 import coordinator_pb2 as pb
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
SERVICES = ("coordinator", "trainer", "rollout", "reward", "advantage")


def docker(*words: str, timeout: float = 180, environment: Mapping[str, str] | None = None) -> str:
    """Run `docker WORDS` and return what it prints to standard output; fails with all that it says."""
    done = subprocess.run(
        ["docker", *words],
        cwd=COMPOSE,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass
class Stack:
    """One project."""

    name: str
    examples: Path
    """What the containers see as /work/examples."""
    settings: dict[str, str] = field(default_factory=dict)
    """On top of deploy/compose/.env."""
    port: int = field(default_factory=free_port)

    @property
    def environment(self) -> dict[str, str]:
        """What compose reads from the environment."""
        mine = {"COMPOSE_PROJECT_NAME": self.name, "EXAMPLES": str(self.examples), "COORDINATOR_PORT": str(self.port)}
        return mine | self.settings

    @property
    def address(self) -> str:
        """Where this machine reaches the coordinator."""
        return f"127.0.0.1:{self.port}"

    def compose(self, *words: str, timeout: float = 240) -> str:
        """Run `docker compose WORDS`."""
        return docker("compose", *words, timeout=timeout, environment=self.environment)

    def up_by(self, file: Path) -> None:
        """Start what a run's configuration needs, by `relaxd up --compose FILE`, and take over its settings."""
        folder = StateFolder(self.examples.parent / ".relaxd")
        words = ("up", str(file), "--compose", "--port", str(self.port), "--state", str(folder.path))
        done = subprocess.run(
            [sys.executable, "-m", "relaxd.cli", *words],
            env=os.environ | self.environment | {"PYTHONPATH": str(ROOT), "CI": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        state = compose.read(folder)
        assert state is not None
        self.settings |= state.settings

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start `docker compose WORDS` without waiting for it; its output is a pipe."""
        return subprocess.Popen(
            ["docker", "compose", *words],
            cwd=COMPOSE,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def scale(self, **replicas: int) -> float:
        """Change how many replicas of services there are; returns how long that took, in seconds."""
        words = [word for service, count in replicas.items() for word in ("--scale", f"{service}={count}")]
        begun = time.monotonic()
        self.compose("up", "--detach", "--no-recreate", "--no-build", *words, *replicas, timeout=400)
        return time.monotonic() - begun

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """`docker inspect` of the containers of the project, or of one of its services."""
        ids = self.compose("ps", "--all", "--quiet", *([service] if service else [])).split()
        return json.loads(docker("inspect", *ids)) if ids else []

    def kill_process(self, service: str) -> str:
        """Kill the first process of a service's container, as a crash would; returns the container's short id.

        (`docker kill` counts as a stop by hand: such a container is not started again.)
        """
        container = self.containers(service)[0]
        os.kill(container["State"]["Pid"], signal.SIGKILL)
        return container["Id"][:12]

    def replicas(self, role: str) -> list[pb.RegisteredReplica]:
        """The replicas of a role that the coordinator knows."""
        with CoordinatorClient(self.address) as coordinator:
            return [one for one in coordinator.replicas() if one.registration.role == role]

    def run(self) -> pb.Run:
        """The newest run."""
        with CoordinatorClient(self.address) as coordinator:
            return coordinator.run()

    def token(self) -> str:
        """An admin's token."""
        words = ("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "cat", "cli", "/run/relaxd/token")
        return self.compose(*words).strip()

    def logs(self) -> str:
        """The end of every container's log."""
        return self.compose("logs", "--no-color", "--tail", "60")


@contextmanager
def running(stack: Stack, settings: Mapping[str, str], file: Path | None = None) -> Iterator[Stack]:
    """Bring the project's services up, with further settings, and have calls of this process carry their token.

    With `file`, a run's configuration, they are those that it needs. Afterwards nothing of the project is left.
    """
    stack.settings |= settings
    try:
        if file is None:
            stack.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "300", timeout=400)
        else:
            stack.up_by(file)
        with patch.dict(os.environ, {"RELAXD_TOKEN": stack.token()}):
            yield stack
    except BaseException:
        print(stack.logs())
        raise
    finally:
        stack.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5", timeout=240)


def bridge_address() -> str:
    """This machine's address on Docker's own bridge: containers of every network reach it."""
    bridge = json.loads(docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]
    # An engine that was never told a gateway takes the network's first address, and does not show it.
    return bridge.get("Gateway") or str(next(ip_network(bridge["Subnet"]).hosts()))


def steps_of(line: str) -> int | None:
    """The step that a line of `relaxd run` is about."""
    found = re.match(r"step +(\d+)/", line)
    return int(found[1]) if found else None


class Run:
    """`relaxd run` in a container, its output being read."""

    def __init__(self, stack: Stack, *words: str) -> None:
        self.process = stack.start("run", "--rm", "--no-deps", "--no-TTY", "cli", "run", *words)
        self.output: list[str] = []
        self.step = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            self.step = steps_of(line) or self.step

    def reach(self, step: int, timeout: float = 240) -> None:
        """Wait for a step."""

        def reached() -> bool:
            assert self.process.poll() is None or self.step >= step, "".join(self.output)
            return self.step >= step

        wait_until(reached, f"step {step} (at {self.step})", timeout)

    def finish(self, timeout: float = 240) -> str:
        """Wait for the end; returns the output."""
        code = self.process.wait(timeout)
        self._reader.join()
        assert code == 0, "".join(self.output)
        return "".join(self.output)
