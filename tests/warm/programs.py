"""Start relaxd's programs as forks of a process that has imported what they import.

Importing torch, transformers and megatron-core takes 5 s of a core, a service's own imports take 1 s, and tests start
thousands of programs. A nursery (`nursery.py`) imports once. It then forks for each `python -m MODULE` that a test, or
a program that a test started, asks `subprocess.Popen` for. The fork has the arguments, environment, folder, descriptors
and session that the program would have had. What differs: its parent is the nursery. That reports its end to whoever
asked, and kills it when that process ends, as Linux would have (PR_SET_PDEATHSIG).

Other programs, other interpreters, and programs whose PYTHONPATH lacks this folder or has another `sitecustomize` start
as usual. All do with RELAXD_TEST_COLD=1, and where there are GPUs: CUDA can't be forked.

The heavy nursery also imports what all tests import, and forks pytest-xdist's workers, where a run is of all tests.

SGLang has an interpreter of its own, and importing it takes 11 s. The first test that needs it starts its nursery
(`start_sglang_nursery`), which forks the processes that SGLang starts by multiprocessing, too.
"""

import contextlib
import fcntl
import gc
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GPU_DRIVER = Path("/dev/nvidiactl")
"""Exists where there are GPUs. A fork can't use them if its parent has initialised CUDA."""
FOLDER, PYTHON, OWNER = "TEST_NURSERY", "TEST_NURSERY_PYTHON", "TEST_NURSERY_OWNER"
"""Environment variables: the folder of the nurseries' sockets, the interpreter that they run, and the process that they
end with."""
WORKERS = "TEST_NURSERY_WORKERS"
"""Environment variable for a nursery: import what tests import, because workers are forked, too."""
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""Program of pytest-xdist's workers."""
COLD = "RELAXD_TEST_COLD"
"""Environment variable that says "don't start any"."""
LIFELINE = "RELAXD_CHILD_LIFELINE"
"""Set for programs that end with the process that started them (`relaxd.process.child`)."""
PROGRAMS = {
    "light": (
        *(
            "relaxd.algorithms.algorithm_trial",
            "relaxd.cli",
            "relaxd.envs.host",
            "relaxd.local.local_launcher",
            "services.advantage",
            "services.agent",
            "services.console",
            "services.coordinator",
            "services.launcher",
        ),
        *("services.reward", "services.reward.reward_trial", "services.reward.worker"),
        *("services.rollout", "services.rollout.judge", "services.rollout.rehearsal", "services.rollout.teacher"),
        *(
            "services.trainer",
            "services.trainer.ranks",
            "services.trainer.critic",
            "services.trainer.offline.fork",
            "services.trainer.reference",
            "services.trainer.teacher",
        ),
    ),
    "heavy": (
        *(
            "services.trainer.loop.training_rank",
            "services.trainer.critic_rank",
            "services.trainer.reference_models.frozen_rank",
        ),
        *("services.trainer.rehearsal", "services.trainer.offline.replay", "tests.chaos.models"),
        *("services.trainer.offline.export_checkpoint", "services.rollout.offline"),
        "services.rollout.engines.transformers.transformers_process",
        *("tests.integration.rollout.weight_source", "relaxd.tools.model_fetch"),
    ),
    "sglang": ("services.rollout.engines.sglang.sglang_process", "sglang.launch_server"),
}
"""Modules by their nursery, which imports them: the light one doesn't import torch."""
ALSO_STARTED = {
    "light": (
        *("tests.integration.health.doubles", "tests.integration.peers"),
        *("tests.integration.scaling.gated", "tests.integration.scoring.enclosed"),
        *("tests.integration.rpc.echo_child", "tests.integration.rpc.leaving_parent"),
        "tests.integration.telemetry.group_main",
    ),
    "heavy": ("tests.integration.trainer.", "tests.integration.weights.member"),
    "sglang": (
        *("tests.integration.rollout.sglang.weights_member", "tests.integration.rollout.sglang.option_cases"),
        *("tests.integration.rollout.sglang.held_engine", "benchmarks.engine_process"),
    ),
}
"""Modules that a nursery starts without having imported them. A name that ends with "." stands for a package."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
STATUS = struct.Struct("i")

Popen: Any = subprocess.Popen
_execute, _poll, _try_wait = Popen._execute_child, Popen._internal_poll, Popen._try_wait
ARGUMENTS = _execute.__code__.co_varnames[1 : _execute.__code__.co_argcount]
"""Names of the arguments of Popen's `_execute_child`, which are all positional."""


@contextlib.contextmanager
def nurseries(*, workers: bool) -> Iterator[None]:
    """Have this process and those that it starts use nurseries, which end with it. `workers`: also for xdist."""
    if os.environ.get(COLD) == "1" or sys.platform != "linux" or GPU_DRIVER.exists():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="nursery-") as folder:
        parents_folder(folder).mkdir()
        path = _with_this_folder(os.environ.get("PYTHONPATH"))
        os.environ.update({FOLDER: folder, PYTHON: sys.executable, OWNER: str(os.getpid()), "PYTHONPATH": path})
        heavy = {WORKERS: "1"} if workers else {}
        processes = [_start_nursery("light", sys.executable), _start_nursery("heavy", sys.executable, heavy)]
        install()
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()


def start_sglang_nursery(python: str, environment: Mapping[str, str]) -> None:
    """Start the nursery of SGLang's interpreter, which ends with the others, unless there is one, or are none.

    `environment` is what SGLang is imported with. Raises RuntimeError: it can't be imported.
    """
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    with (folder / "sglang-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _python("sglang") is not None:
            return
        (folder / "sglang").unlink(missing_ok=True)
        process = _start_nursery("sglang", python, environment)
        if not _await_imports("sglang"):
            raise RuntimeError(f"the nursery that imports SGLang has ended with {process.wait()}")
        (folder / "sglang-python").write_text(python)


def _start_nursery(name: str, python: str, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start a nursery, which connections can be made to at once. `environment` is added to this process's."""
    padding = "-" * 4096  # of its command line, which forks overwrite with theirs
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{os.environ[FOLDER]}/{name}")
        listener.listen(256)
        words = ["-c", "from tests.warm import nursery; nursery.main()", name, str(listener.fileno()), padding]
        return subprocess.Popen(
            [python, *words],
            env=os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0", "OMP_NUM_THREADS": "1"} | dict(environment or {}),
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _python(name: str) -> str | None:
    """Return the interpreter of a nursery; None if it wasn't started."""
    if name != "sglang":
        return os.environ[PYTHON]
    with contextlib.suppress(FileNotFoundError):
        return Path(os.environ[FOLDER], "sglang-python").read_text()
    return None


def _nursery_of(module: str) -> str | None:
    """Return the name of the nursery that starts a module; None if none does."""
    for name, modules in PROGRAMS.items():
        if module in modules:
            return name
        if any(module.startswith(each) if each.endswith(".") else module == each for each in ALSO_STARTED[name]):
            return name
    return None


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
    of_linux = of_psutil._psplatform.Process
    true_parent = of_linux.ppid

    def parent(self: Any) -> int:
        with contextlib.suppress(FileNotFoundError):
            return int((folder / str(self.pid)).read_text())
        found: int = true_parent(self)
        return found

    of_linux.ppid = parent


def _with_this_folder(path: str | None) -> str:
    return os.pathsep.join(filter(None, (str(ROOT), path, str(HERE))))


def install() -> None:
    """Have `subprocess.Popen` of this process ask the nurseries."""
    Popen._execute_child = _execute_child
    Popen._internal_poll = _internal_poll
    Popen._try_wait = _wait_warm


def _warm(named: Mapping[str, Any]) -> str | None:
    """Return the nursery that starts this program; None: none does."""
    words = named["args"]
    if named["shell"] or named["executable"] is not None or not isinstance(words, list) or FOLDER not in os.environ:
        return None
    if words == [sys.executable, "-u", "-c", WORKER]:
        return "heavy" if _await_imports("heavy") else None
    if len(words) < 3 or words[1] != "-m" or (name := _nursery_of(words[2])) is None or words[0] != _python(name):
        return None
    variables = os.environ if named["env"] is None else named["env"]
    path = variables.get("PYTHONPATH", "").split(os.pathsep)
    folder = Path(named["cwd"] or os.getcwd())
    other_source = folder != ROOT and (folder / "relaxd" / "__init__.py").exists()
    changed = any(entry != str(HERE) and os.path.exists(f"{entry}/sitecustomize.py") for entry in path)
    if str(HERE) not in path or other_source or changed or "LD_PRELOAD" in variables or not _is_ready(name):
        return None
    return name


def freeze_for_good() -> None:
    """Exempt all objects from garbage collections, also from those of `relaxd.process.upkeep.freeze_objects`.

    It would look through all that tests import, for seconds, each time a coordinator or a trainer starts a run.
    """
    gc.freeze()
    collector: Any = gc
    collector.unfreeze = lambda: None


def begin_imports() -> None:
    """Have the nurseries import now, because many programs will be asked for."""
    if FOLDER in os.environ:
        for name in ("light", "heavy"):
            _is_ready(name)


def _is_ready(name: str) -> bool:
    """Return whether a nursery has imported; else have it do that. Programs start as usual meanwhile."""
    folder = os.environ[FOLDER]
    if os.path.exists(ready_file(folder, name)):
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.connect(f"{folder}/{name}")
    return False


def _await_imports(name: str) -> bool:
    """Wait until a nursery has imported, which takes as long as a cold start of a program. Return whether it has."""
    # It closes the connection then.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
        connection.connect(f"{os.environ[FOLDER]}/{name}")
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    return _is_ready(name)


def _execute_child(self: Any, *given: Any) -> None:
    """Replace Popen's own `_execute_child`."""
    named = dict(zip(ARGUMENTS, given, strict=False))
    name = _warm(named)
    if name is None:
        return _execute(self, *given)
    pipes = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
    variables = dict(os.environ if named["env"] is None else named["env"])
    streams = [theirs if theirs != -1 else ours for ours, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]
    request = {
        "args": [str(word) for word in named["args"]],
        "env": {os.fsdecode(key): os.fsdecode(value) for key, value in variables.items()},
        "cwd": os.path.abspath(named["cwd"] or os.getcwd()),
        "session": bool(named["start_new_session"]),
        "prepare": _name(named["preexec_fn"]),
        "dies_by": signal.SIGTERM if named["preexec_fn"] else signal.SIGKILL if LIFELINE in variables else 0,
    }
    self.pid, self._nursery = _ask(name, request, streams, named["pass_fds"])
    self._close_pipe_fds(*pipes)
    self._child_created = True
    return None


def _ask(
    name: str, request: dict[str, Any], streams: Sequence[int], others: Sequence[int]
) -> tuple[int, socket.socket]:
    """Have a nursery start a program. Return its process id, and what its end is received from.

    Its descriptors are `streams` as 0, 1 and 2, and `others` under their numbers.
    """
    request["descriptors"] = [0, 1, 2, *others]
    request["limits"] = [resource.getrlimit(limit) for limit in LIMITS]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"{os.environ[FOLDER]}/{name}")
    # Too large for a message with descriptors if the environment is.
    with tempfile.TemporaryFile() as text:
        text.write(json.dumps(request).encode())
        text.flush()
        socket.send_fds(connection, [b"start"], [text.fileno(), *streams, *others])
    answer = connection.recv(64)
    if not answer:
        connection.close()
        raise subprocess.SubprocessError(f"the nursery has not started {' '.join(request['args'])}")
    return STATUS.unpack(answer)[0], connection


def install_spawning(name: str) -> None:
    """Have the nursery `name` start the processes that this one starts by multiprocessing, whose method is "spawn"."""
    from multiprocessing import popen_spawn_posix, util

    nurseries: dict[int, socket.socket] = {}
    true_spawn, true_poll = util.spawnv_passfds, popen_spawn_posix.Popen.poll

    def spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        resources = args[-1] != "--multiprocessing-fork"  # their tracker, which outlives the others
        if resources or "LD_PRELOAD" in os.environ or not _is_ready(name):
            pid: int = true_spawn(path, args, passfds)
            return pid
        request = {
            "args": [os.fsdecode(word) for word in args],
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "session": False,
            "prepare": [],
            "dies_by": signal.SIGKILL,  # as SGLang's processes see to
        }
        pid, nurseries[pid] = _ask(name, request, (0, 1, 2), sorted(set(map(int, passfds))))
        return pid

    def poll(self: Any, flag: int = os.WNOHANG) -> int | None:
        if self.pid not in nurseries:
            code: int | None = true_poll(self, flag)
            return code
        if self.returncode is None:
            pid, status = _wait(self.pid, nurseries[self.pid], flag)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode  # type: ignore[no-any-return]

    util.spawnv_passfds = spawn
    popen_spawn_posix.Popen.poll = poll


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
    return _try_wait(self, flags) if connection is None else _wait(self.pid, connection, flags)


def _wait(pid: int, connection: socket.socket, flags: int) -> tuple[int, int]:
    """Wait for the end of a fork; return its process id and wait status, or zeros."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(0 if flags & os.WNOHANG else None):
        return 0, 0
    answer = connection.recv(64)
    connection.close()
    return pid, STATUS.unpack(answer)[0] if answer else signal.SIGKILL
