"""A tiny run: a random model, a reward of the test's own, and the real command on real services."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from relaxd.local.state_folder import StateFolder
from tests.kit.models import make_tiny_model
from tests.kit.ports import occupy_default_port
from tests.kit.processes import start_python

# A random model never adds right: reward something that differs between samples.
REWARD = """
def even_bytes(sample):
    data = sample.response.encode()
    share = sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
    return {"reward": share, "accuracy": float(share > 0.5), "format": float(len(data) > 2)}
"""
CONFIG = """
[run]
steps = {steps}

[model]
path = "{model}"

[data]
source = "addition"
digits = 1
max_prompt_tokens = 128

[reward]
name = "tiny_reward:even_bytes"
workers = 1

[rollout]
samples_per_prompt = 4
max_new_tokens = 12
threads = 1

[trainer]
groups_per_step = 2
threads = 1

[trainer.optimizer]
lr = 1e-3

[eval]
prompts = 4
"""


@dataclass
class Workplace:
    """A folder with a configuration in which the command is run."""

    folder: Path
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, *words: str, **environment: str) -> "subprocess.Popen[str]":
        """Start `relaxd WORDS` without waiting for it."""
        occupy_default_port()
        process = start_python(
            *("-m", "relaxd.cli", *words),
            cwd=self.folder,
            environment={"CI": "1"} | environment,
            clean=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def kill_in_step(self, run: "subprocess.Popen[str]", step: int, role: str, replicas: int = 1) -> None:
        """Kill the first of a role's replicas when a run has taken a step, and wait until the run has succeeded."""
        state = StateFolder(self.folder / ".relaxd")
        assert run.stdout is not None
        killed, lines = 0, []
        for line in run.stdout:
            lines.append(line)
            if re.match(rf"step +{step}/", line):
                there = [service for service in state.read().services if service.role == role]
                assert len(there) == replicas
                assert there[0].pid is not None  # None is this process to psutil
                psutil.Process(there[0].pid).send_signal(signal.SIGKILL)
                killed += 1
        assert run.wait(timeout=60) == 0, "".join(lines)
        assert killed == 1

    def relaxd(self, *words: str, timeout: float = 240, **environment: str) -> tuple[int, str]:
        """Run `relaxd WORDS`; returns its exit code and what it printed."""
        process = self.start(*words, **environment)
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output

    def end(self) -> None:
        """End the commands that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # its supervisor goes with it
                process.wait(timeout=60)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@contextlib.contextmanager
def open_workplace(folder: Path, model: Path) -> Iterator[Workplace]:
    """A workplace whose processes end with the block."""
    (folder / "tiny_reward.py").write_text(REWARD)
    (folder / "tiny.toml").write_text(CONFIG.format(model=model, steps=3))
    place = Workplace(folder)
    yield place
    place.end()
    if StateFolder(folder / ".relaxd").is_up():
        code, output = place.relaxd("down")
        assert code == 0, output


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path, tiny_model) as place:
        yield place
