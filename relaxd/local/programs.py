"""Programs that the command line runs and waits for."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from relaxd.client.errors import CliError
from relaxd.local.environment import python_path


def run_program(module: str, words: Sequence[str], *, seconds: float, text: str = "") -> dict[str, Any]:
    """Run a program with `text` as its input. Returns its JSON result, the last line of its output.

    Its stderr, with its progress, is this process's. Raises CliError: the result has an "error", or there is none.
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
