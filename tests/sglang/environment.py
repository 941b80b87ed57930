"""The environment in which the tests run the real SGLang on a CPU: found, or built and kept.

    python -m tests.sglang.environment     # builds it if need be, and prints its interpreter

It is apart from ours because SGLang pins versions that we don't. RELAXD_SGLANG_VENV names one that is there already;
else it is ~/.cache/relaxd/venvs/sglang-HASH, with a new hash whenever what goes into it changes. TORCH_INDEX_URL is
where pip finds CPU builds of torch, if not by itself.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path

from tests.warm.programs import start_sglang_nursery

HERE = Path(__file__).parent
PROJECT = HERE.parents[1] / "pyproject.toml"
WITHOUT_DEPENDENCIES = ("sglang==0.5.15.post1", "torchvision==0.28.0")
BUILD_SECONDS = 900
CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What SGLang's processes need to run on a CPU."""
CPU_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": 16384,
    "chunked_prefill_size": -1,
}
"""[rollout.sglang] on a CPU."""


class EnvironmentUnavailable(Exception):
    """The environment is not there and cannot be built; the message is pip's."""


def sglang_python() -> str:
    """Return the interpreter of the environment, which is built first if need be. Its programs start quickly then.

    Raises EnvironmentUnavailable.
    """
    python = _find()
    start_sglang_nursery(python, CPU_ENVIRONMENT)
    return python


def _find() -> str:
    if given := os.environ.get("RELAXD_SGLANG_VENV"):
        python = Path(given) / "bin" / "python"
        if not python.exists():
            raise EnvironmentUnavailable(f"RELAXD_SGLANG_VENV is {given}, but there is no {python}")
        return str(python)
    folder = Path.home() / ".cache" / "relaxd" / "venvs" / f"sglang-{_hash()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time
        if not (folder / "complete").exists():
            _build(folder)
    return str(folder / "bin" / "python")


def _hash() -> str:
    parts = [(HERE / "requirements.txt").read_text(), (HERE / "cpu_shim.py").read_text(), *_own_dependencies()]
    return hashlib.sha256("\n".join([*parts, *WITHOUT_DEPENDENCIES, sys.version]).encode()).hexdigest()[:12]


def _own_dependencies() -> list[str]:
    """What relaxd itself needs, as the engine's process imports it."""
    return list(tomllib.loads(PROJECT.read_text())["project"]["dependencies"])


def _build(folder: Path) -> None:
    print(f"building {folder}: some minutes, once", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    index = os.environ.get("TORCH_INDEX_URL")
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    _run([*install, *(["--extra-index-url", index] if index else []), "-r", str(HERE / "requirements.txt")])
    _run([*install, *_own_dependencies()])
    _run([*install, "--no-deps", *WITHOUT_DEPENDENCIES])
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.copy(HERE / "cpu_shim.py", packages / "sglang_cpu_shim.py")
    (packages / "sglang_cpu_shim.pth").write_text("import sglang_cpu_shim\n")
    (folder / "complete").touch()


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except subprocess.CalledProcessError as error:
        raise EnvironmentUnavailable(f"pip cannot install SGLang: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnavailable(f"pip did not install SGLang within {BUILD_SECONDS} s") from error


if __name__ == "__main__":
    print(sglang_python())
