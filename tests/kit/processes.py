"""Python programs that tests run: services, doubles, members of a group."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.kit.namespaces import Node
from tests.kit.waiting import PATIENCE
from tests.warm import programs

ROOT = Path(__file__).parents[2]
COLD = {"PYTHONPATH": str(ROOT)}
"""Variables with which no nursery forks (`tests/warm`): it would end or reap a child itself, and show its own
variables."""


def start_python(
    *words: str,
    log: Path | None = None,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    clean: bool = False,
    python: str = sys.executable,
    within: Node | None = None,
    **options: Any,
) -> "subprocess.Popen[Any]":
    """Start `python WORDS`, which can import the repository's packages, `within` a network namespace if one is given.

    `environment` is set on top of this process's, of which `clean` leaves out what configures relaxd. Output is
    appended to the file `log`, if given. Other options are those of Popen.
    """
    program = [python, *words]
    variables = _environment(environment, clean=clean)
    if within is not None:
        program = within.command(program)
        variables.pop(programs.PYTHON, None)  # a fork of a nursery would run in the nursery's namespace
    if log is None:
        return subprocess.Popen(program, cwd=cwd, env=variables, **options)
    with log.open("ab") as file:
        return subprocess.Popen(program, cwd=cwd, env=variables, stdout=file, stderr=file, **options)


def run_python(
    *words: str,
    seconds: float = 120.0,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    clean: bool = False,
    python: str = sys.executable,
    given: str | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run `python WORDS` to its end, which must come in time; `given` is its input. See `start_python`."""
    return subprocess.run(
        [python, *words],
        cwd=cwd,
        env=_environment(environment, clean=clean),
        input=given,
        capture_output=True,
        text=True,
        timeout=seconds * PATIENCE,
        check=False,
    )


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH of folders and of what this process's has, so that programs are forks (`tests/warm`)."""
    return os.pathsep.join((*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])))


def kill(*processes: "subprocess.Popen[Any]") -> None:
    """Kill processes, also stopped ones, and wait for their ends."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
    for process in processes:
        process.wait(timeout=60)


def is_alive(pid: int | None) -> bool:
    """Return whether a process runs; a zombie doesn't."""
    try:
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Partner:
    """A Python program that takes commands as lines of JSON and answers with others."""

    def __init__(self, *words: str, **options: Any) -> None:
        """Start it; `options` are those of `start_python`."""
        self.process = start_python(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)

    def tell(self, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 120.0) -> dict[str, Any]:
        """Wait for the next answer."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:  # select() knows no descriptor above 1023
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(seconds * PATIENCE)
        assert ready, f"no answer within {seconds * PATIENCE:g} s"
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(60)}"
        return dict(json.loads(line))

    def close(self) -> None:
        """Kill it."""
        kill(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _environment(changes: Mapping[str, str] | None, *, clean: bool) -> dict[str, str]:
    ours = ("RELAXD_", "OTEL_", "REDIS_URL") if clean else ()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "RELAXD_CONSOLE": "no", **(changes or {})}
