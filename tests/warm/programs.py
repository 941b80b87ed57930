"""Start relaxd's programs as forks of a process that has imported what they import.

Importing torch, transformers and megatron-core takes 5 s of a core, a service's own imports take 1 s, and tests start
thousands of programs. A nursery (`nursery.py`) imports once. It then forks for each `python -m MODULE` that a test, or
a program that a test started, asks `subprocess.Popen` for. The fork has the arguments, environment, folder, descriptors
and session that the program would have had. What differs: its parent is the nursery. That reports its end to whoever
asked, and kills it when that process ends, as Linux would have (PR_SET_PDEATHSIG).

Other programs, other interpreters, and programs whose PYTHONPATH lacks this folder or has another `sitecustomize` start
as usual. All do with RELAXD_TEST_COLD=1, and where there are GPUs: CUDA can't be forked.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER, PYTHON, COLD = "TEST_NURSERY", "TEST_NURSERY_PYTHON", "RELAXD_TEST_COLD"
"""Environment variables: the folder of the nurseries' sockets, the interpreter that they run, and "don't start any"."""
LIFELINE = "RELAXD_CHILD_LIFELINE"
"""Set for programs that end with the process that started them (`relaxd.process.child`)."""
PROGRAMS = {
    "light": (
        *("relaxd.cli", "relaxd.local.launcher", "services.advantage", "services.coordinator", "services.reward"),
        *("services.reward.worker", "services.rollout", "services.rollout.judge", "services.rollout.teacher"),
        *("services.trainer", "services.trainer.critic", "services.trainer.reference", "services.trainer.teacher"),
    ),
    "heavy": (
        *("services.trainer.loop.rank", "services.trainer.critic.rank", "services.trainer.frozen.rank"),
        *("services.trainer.rehearsal.rank", "services.trainer.offline.replay", "tests.chaos.models"),
        *("services.trainer.offline.export_checkpoint", "services.rollout.engines.transformers.process"),
        "tests.integration.rollout.weight_source",
    ),
}
"""Modules by their nursery: the light one doesn't import torch."""
NURSERY = {module: name for name, modules in PROGRAMS.items() for module in modules}
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
STATUS = struct.Struct("i")

Popen: Any = subprocess.Popen
_execute, _poll, _try_wait = Popen._execute_child, Popen._internal_poll, Popen._try_wait
ARGUMENTS = _execute.__code__.co_varnames[1 : _execute.__code__.co_argcount]
"""Names of the arguments of Popen's `_execute_child`, which are all positional."""


@contextlib.contextmanager
def nurseries() -> Iterator[None]:
    """Have this process and those that it starts use nurseries, which end with it."""
    if os.environ.get(COLD) == "1" or sys.platform != "linux" or Path("/dev/nvidiactl").exists():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="nursery-") as folder:
        parents_folder(folder).mkdir()
        path = _with_this_folder(os.environ.get("PYTHONPATH"))
        os.environ.update({FOLDER: folder, PYTHON: sys.executable, "PYTHONPATH": path})
        processes = []
        for name in PROGRAMS:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(f"{folder}/{name}")
            listener.listen(256)
            padding = "-" * 4096  # of its command line, which forks overwrite with theirs
            words = ["-c", "from tests.warm import nursery; nursery.main()", name, str(listener.fileno()), padding]
            processes.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    env=os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0", "OMP_NUM_THREADS": "1"},
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
            listener.close()
        install()
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()


def parents_folder(folder: str) -> Path:
    """Return the folder with a file for each fork, its name: who asked for it."""
    return Path(folder) / "parents"


def ready_file(folder: str, name: str) -> Path:
    """Return the file that a nursery writes once it has imported."""
    return Path(folder) / f"{name}-ready"


def show_parents() -> None:
    """Have psutil tell who asked for a fork as its parent."""
    if FOLDER not in os.environ:
        return
    import psutil

    of_psutil: Any = psutil
    true_parents, folder = of_psutil._psplatform.ppid_map, parents_folder(os.environ[FOLDER])

    def parents() -> dict[int, int]:
        found = true_parents()
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found[int(file.name)] = int(file.read_text())
        return found

    of_psutil._ppid_map = parents


def _with_this_folder(path: str | None) -> str:
    return os.pathsep.join(filter(None, (str(ROOT), path, str(HERE))))


def install() -> None:
    """Have `subprocess.Popen` of this process ask the nurseries."""
    Popen._execute_child = _execute_child
    Popen._internal_poll = _internal_poll
    Popen._try_wait = _wait_warm


def _warm(named: Mapping[str, Any]) -> str | None:
    """Return the module if a nursery starts this program."""
    words = named["args"]
    if named["shell"] or named["executable"] is not None or not isinstance(words, list) or FOLDER not in os.environ:
        return None
    if len(words) < 3 or words[:2] != [sys.executable, "-m"] or words[2] not in NURSERY:
        return None
    path = (os.environ if named["env"] is None else named["env"]).get("PYTHONPATH", "").split(os.pathsep)
    folder = Path(named["cwd"] or os.getcwd())
    other_source = folder != ROOT and (folder / "relaxd" / "__init__.py").exists()
    changed = any(entry != str(HERE) and os.path.exists(f"{entry}/sitecustomize.py") for entry in path)
    if str(HERE) not in path or other_source or changed or not _is_ready(NURSERY[words[2]]):
        return None
    return words[2]


def _is_ready(name: str) -> bool:
    """Return whether a nursery has imported; else have it do that. Programs start as usual meanwhile."""
    folder = os.environ[FOLDER]
    if os.path.exists(ready_file(folder, name)):
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.connect(f"{folder}/{name}")
    return False


def _execute_child(self: Any, *given: Any) -> None:
    """Replace Popen's own `_execute_child`."""
    named = dict(zip(ARGUMENTS, given, strict=False))
    module = _warm(named)
    if module is None:
        return _execute(self, *given)
    pipes = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
    variables = dict(os.environ if named["env"] is None else named["env"])
    streams = [theirs if theirs != -1 else ours for ours, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]
    request = {
        "module": module,
        "args": [str(word) for word in named["args"]],
        "env": {os.fsdecode(key): os.fsdecode(value) for key, value in variables.items()},
        "cwd": os.path.abspath(named["cwd"] or os.getcwd()),
        "session": bool(named["start_new_session"]),
        "prepare": _name(named["preexec_fn"]),
        "descriptors": [0, 1, 2, *named["pass_fds"]],
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "dies_by": signal.SIGTERM if named["preexec_fn"] else signal.SIGKILL if LIFELINE in variables else 0,
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"{os.environ[FOLDER]}/{NURSERY[module]}")
    # Too large for a message with descriptors if the environment is.
    with tempfile.TemporaryFile() as text:
        text.write(json.dumps(request).encode())
        text.flush()
        socket.send_fds(connection, [b"start"], [text.fileno(), *streams, *named["pass_fds"]])
    answer = connection.recv(64)
    self._close_pipe_fds(*pipes)
    if not answer:
        connection.close()
        raise subprocess.SubprocessError(f"the nursery has not started {module}")
    self._nursery = connection
    self.pid = STATUS.unpack(answer)[0]
    self._child_created = True
    return None


def _name(function: Callable[[], None] | None) -> list[str]:
    """Return the module and the name of a function."""
    if function is None:
        return []
    module = sys.modules[function.__module__]
    spec = getattr(module, "__spec__", None)
    return [spec.name if spec is not None else module.__name__, function.__name__]


def _internal_poll(self: Any, *arguments: Any, **options: Any) -> int | None:
    """Replace Popen's own `_internal_poll`."""
    if getattr(self, "_nursery", None) is None:
        return _poll(self, *arguments, **options)
    if self.returncode is None and self._waitpid_lock.acquire(False):
        try:
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
        finally:
            self._waitpid_lock.release()
    return self.returncode


def _wait_warm(self: Any, flags: int) -> tuple[int, int]:
    """Replace Popen's own `_try_wait`: return the process id and wait status, or zeros."""
    connection = getattr(self, "_nursery", None)
    if connection is None:
        return _try_wait(self, flags)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(0 if flags & os.WNOHANG else None):
        return 0, 0
    answer = connection.recv(64)
    connection.close()
    return self.pid, STATUS.unpack(answer)[0] if answer else signal.SIGKILL
