"""A shell with relaxd and grpcurl, and a folder with a task, for the commands of a page."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.kit.processes import ROOT

SECONDS = 120.0


class Shell:
    """Runs commands one after the other, as typed into one shell: variables stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._variables = folder / ".variables"
        self._variables.touch()
        path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {"PATH": path}

    def run(self, command: str) -> str:
        """Run a command in the folder. Returns its output, errors included."""
        script = f". {self._variables}\nset -a\n{command}\nexport -p > {self._variables}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return done.stdout


def make_task(folder: Path, model: Path) -> None:
    """Write what `relaxd init` writes, but with a tiny random model, which never earns a reward, and small steps."""
    for source, name in (("jsonl.toml", "run.toml"), ("prompts.jsonl", "prompts.jsonl"), ("reward.py", "reward.py")):
        shutil.copyfile(ROOT / "examples" / source, folder / name)
    text = (folder / "run.toml").read_text().replace('"smollm2-135m"', f'"{model}"')
    text = text.replace("groups_per_step = 4", "groups_per_step = 2\nthreads = 1").replace(
        "max_new_tokens = 16", "max_new_tokens = 16\nthreads = 1"
    )
    (folder / "run.toml").write_text(text + "\n[algorithm]\ndrop_zero_variance = false\n")
