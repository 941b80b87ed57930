"""`relaxd up --compose` and what works on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compose.stack import ROOT, Stack, docker

pytestmark = pytest.mark.night


@pytest.mark.timeout(1800)
def test_up_run_status_down(stack: Stack, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAXD_")}
    environment |= {"PYTHONPATH": str(ROOT), "CI": "1"}
    environment |= {name: stack.environment[name] for name in ("COMPOSE_PROJECT_NAME", "EXAMPLES")}

    def relaxd(*words: str, timeout: float = 300) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "relaxd.cli", *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.returncode, done.stdout

    try:
        code, output = relaxd("up", "--compose", "--port", "0", "--reward", "2", timeout=900)
        assert code == 0, output
        assert "up: the coordinator is at 127.0.0.1:" in output
        assert relaxd("up", "--compose")[0] == 1
        stack.compose("cp", str(tmp_path / "tiny"), "coordinator:/models/")

        config = str(stack.examples / "tiny.toml")
        code, output = relaxd("run", config, "--run-id", "first", "--run.steps", "2", "--rollout.max_new_tokens", "4")
        assert code == 0, output
        assert "the run's files are on the coordinator's machine, in /work/runs/first" in output

        code, output = relaxd("status")
        assert code == 0, output
        for expected in ("containers", f"{stack.name}-reward-2", "(healthy)", "first", "stopped", "2/2"):
            assert expected in output
        code, output = relaxd("down")
        assert (code, output) == (0, "down\n")
        assert not stack.containers()
        assert relaxd("down")[1].startswith("nothing is up")
        assert f"{stack.name}_runs" in docker("volume", "ls", "--quiet").split()  # what was learnt stays
    finally:
        stack.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5", timeout=120)
