"""Programs that the command line runs and waits for: their modules, their environment, and their start."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Any

import relaxd
from relaxd.client import CliError

EXPORT_CHECKPOINT = "services.trainer.offline.export_checkpoint"
REPLAY = "services.trainer.offline.replay"
FORK = "services.trainer.offline.fork"
ALGORITHM_TRIAL = "relaxd.algorithms.algorithm_trial"
REWARD_TRIAL = "services.reward.reward_trial"
ROLLOUT_OFFLINE = "services.rollout.offline"
MANY_ROLLOUTS = "services.rollout.rehearsal"
CONSOLE_MODULE = "services.console"
EXIT_SECONDS = 30.0
"""Maximum seconds for a program to exit after its last output."""


def console_installed() -> bool:
    """Return True if the console's package aiohttp is installed."""
    return importlib.util.find_spec("aiohttp") is not None


def python_path() -> str:
    """Return a value for PYTHONPATH with which child processes find relaxd and the services."""
    source = str(Path(relaxd.__file__).parents[1])
    return os.pathsep.join(path for path in (source, os.environ.get("PYTHONPATH", "")) if path)


def run_program(module: str, words: Sequence[str], *, seconds: float, text: str = "") -> dict[str, Any]:
    """Run a program with `text` as its input. Returns the program's result, the JSON in the last line of its output.

    The program's progress goes to this process's stderr. Raises CliError if the result has an "error" or is missing.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds,
            check=False,
            env=os.environ | {"PYTHONPATH": python_path()},
        )
    except subprocess.TimeoutExpired as error:
        raise CliError(f"{module} did not finish within {seconds:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    try:
        result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except ValueError:
        result = {}
    if done.returncode or "error" in result or not result:
        raise CliError(result.get("error") or f"{module} ended with exit code {done.returncode}")
    return result


def stream_program(
    module: str, words: Sequence[str], text: str, *, seconds: float
) -> Generator[dict[str, Any], None, None]:
    """Run a program with `text` as its input, and yield its output, a JSON object in each line.

    The program shares this process's stderr. It is killed when the caller has waited `seconds` for its first or next
    line, or when the iterator is closed. Raises CliError: a line has an "error", or the program fails or is killed.
    """
    with tempfile.TemporaryFile("w+") as given:
        given.write(text)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=given,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": python_path()},
        )
    assert process.stdout is not None
    is_late = threading.Event()
    try:
        while line := _next_line(process, process.stdout, seconds, is_late):
            found: dict[str, Any] = json.loads(line)
            if "error" in found:
                raise CliError(found["error"])
            yield found
        if code := process.wait(timeout=EXIT_SECONDS):
            if is_late.is_set():
                raise CliError(f"{module} was killed after {seconds:.0f} s without an answer")
            raise CliError(f"{module} ended with exit code {code}")
    except subprocess.TimeoutExpired as error:
        raise CliError(f"{module} did not end within {EXIT_SECONDS:g} s after its last output") from error
    finally:
        process.kill()
        process.wait(timeout=EXIT_SECONDS)
        process.stdout.close()


def _next_line(process: subprocess.Popen[str], output: IO[str], seconds: float, is_late: threading.Event) -> str:
    """Return a program's next line of output, "" at its end. After `seconds`, set `is_late` and kill the program."""

    def give_up() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        return output.readline()
    finally:
        timer.cancel()
