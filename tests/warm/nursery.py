"""The process that programs are forked from: `python -c "from tests.warm import nursery; ..." NAME DESCRIPTOR PADDING`.

It listens on the socket DESCRIPTOR. See `programs` for what it is asked, and why. It has one thread and starts none: a
fork has the memory of all threads, but only one of them.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import re
import resource
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.warm import programs

ALSO = {
    "light": ("psutil", "relaxd.local.supervisor"),
    "heavy": (
        "psutil",
        "megatron.core.optimizer",
        "megatron.core.models.gpt",
        "transformers.models.auto.modeling_auto",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.llama.modeling_llama",
        "transformers.generation.utils",
        "transformers.tokenization_utils_tokenizers",
    ),
    "sglang": ("psutil", "sglang.srt.models.registry", "sglang.srt.entrypoints.http_server"),
}
"""Modules that programs import only after they have started."""
IMPORT = re.compile(r"^(?:from|import) ((?:relaxd|services)\b[\w.]*)", re.MULTILINE)
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"
"""A module that reads SGLANG_FORCE_STREAM_INTERVAL when it is imported; relaxd's engines set it later."""


@dataclass
class Start:
    """A request: a program, and the descriptors that came with it."""

    request: dict[str, Any]
    descriptors: list[int]
    asker: int
    """The process that asked."""


@dataclass
class Fork:
    """A program that runs."""

    pid: int
    ended: int
    """Descriptor that becomes readable with its end."""
    asker: int
    """The same of the process that asked for it; -1 once that has ended."""
    connection: socket.socket
    dies_by: int


class Nursery:
    """Forks programs, and reports their ends."""

    def __init__(self, name: str, listener: socket.socket) -> None:
        self._name, self._listener = name, listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._owner = os.pidfd_open(int(os.environ[programs.OWNER]))
        self._selector.register(self._owner, selectors.EVENT_READ, lambda: os._exit(0))
        self._forks: dict[int, Fork] = {}
        self._parents = programs.parents_folder(os.environ[programs.FOLDER])
        self._imported = False
        self._path = [entry for entry in sys.path if entry not in os.environ["PYTHONPATH"].split(os.pathsep)]

    def serve(self) -> Start:
        """Answer requests for ever. Returns in the forks only, with what they have to run."""
        while True:
            for key, _ in self._selector.select():
                start = key.data()
                if start is not None:
                    self._close()
                    return start

    def _close(self) -> None:
        """Close what a fork doesn't need, so that nothing closes these descriptors once they are something else's."""
        self._listener.close()
        self._selector.close()
        os.close(self._owner)
        for fork in self._forks.values():
            fork.connection.close()

    def _accept(self) -> Start | None:
        connection, _ = self._listener.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, 16, 253)
        if not self._imported:
            self._import()
        if not message:  # that was all that was wanted, or who asked has ended
            connection.close()
            return None
        text, *given = descriptors
        with os.fdopen(text, "rb") as file:
            file.seek(0)
            request = json.load(file)
        asker = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        try:
            asker_ended = os.pidfd_open(asker)
        except ProcessLookupError:  # nobody wants it any more
            for descriptor in given:
                os.close(descriptor)
            connection.close()
            return None
        started, starting = os.pipe()
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(started)
            return Start(request, [starting, *given], asker)
        os.close(starting)
        for descriptor in given:
            os.close(descriptor)
        os.read(started, 1)  # it has its session by now: its process group can be killed
        os.close(started)
        fork = Fork(pid, os.pidfd_open(pid), asker_ended, connection, request["dies_by"])
        self._forks[pid] = fork
        self._show_parent(pid, asker)
        self._selector.register(fork.ended, selectors.EVENT_READ, partial(self._report, fork))
        self._selector.register(fork.asker, selectors.EVENT_READ, partial(self._end_with, pid))
        self._send(connection, pid)
        return None

    def _show_parent(self, pid: int, asker: int) -> None:
        """Write who asked for a fork, for `programs.show_parents`, at once as a whole."""
        new = self._parents.parent / f"new-{self._name}"
        new.write_text(str(asker))
        new.rename(self._parents / str(pid))

    def _end_with(self, pid: int) -> None:
        """End a program as its asker has ended."""
        fork = self._forks.get(pid)
        if fork is None:  # it has ended in the same moment
            return
        self._forget_asker(fork)
        if fork.dies_by:
            signal.pidfd_send_signal(fork.ended, fork.dies_by)

    def _report(self, fork: Fork) -> None:
        """Report the end of a program."""
        status = os.waitpid(fork.pid, 0)[1]
        self._selector.unregister(fork.ended)
        os.close(fork.ended)
        if fork.asker >= 0:
            self._forget_asker(fork)
        del self._forks[fork.pid]
        self._send(fork.connection, status)
        fork.connection.close()

    def _forget_asker(self, fork: Fork) -> None:
        (self._parents / str(fork.pid)).unlink(missing_ok=True)
        self._selector.unregister(fork.asker)
        os.close(fork.asker)
        fork.asker = -1

    def _send(self, connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):  # who asked has ended
            connection.send(programs.STATUS.pack(number))

    def _import(self) -> None:
        """Import what the programs import. The programs themselves each fork imports anew."""
        programs.show_parents()
        mains = []
        for module in programs.PROGRAMS[self._name]:
            package = importlib.import_module(module)
            main = f"{module}.__main__" if hasattr(package, "__path__") else module
            importlib.import_module(main)
            mains.append(main)
        for main in mains:
            del sys.modules[main]
            parent, _, name = main.rpartition(".")
            delattr(sys.modules[parent], name)
        for module in ALSO[self._name]:
            importlib.import_module(module)
        if programs.WORKERS in os.environ:
            _import_what_tests_import()
        if self._name == "sglang":  # it looks for its memory, which forks use for other words
            importlib.import_module("setproctitle").getproctitle()
        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            raise RuntimeError(f"importing the {self._name} programs has started {len(threads) - 1} threads")
        if self._name == "light" and "torch" in sys.modules:
            raise RuntimeError("services that need no torch import it")
        gc.collect()
        programs.freeze_for_good()  # what forks share isn't copied by their collections
        self._imported = True
        programs.ready_file(os.environ[programs.FOLDER], self._name).touch()

    def path(self, request: dict[str, Any]) -> list[str]:
        """Return the module search path that a program would have had."""
        given = request["env"].get("PYTHONPATH", "").split(os.pathsep)
        return [request["cwd"], *filter(None, given), *(entry for entry in self._path if entry)]


def become(start: Start, path: list[str]) -> None:
    """Be the program that was asked for, but for its modules' names."""
    request, (starting, *given) = start.request, start.descriptors
    if request["session"]:
        os.setsid()
    os.getppid = lambda: start.asker
    wanted = request["descriptors"]
    above = max(*wanted, *given, starting) + 1
    moved = [_above(one, above) for one in (starting, *given)]
    for one in (starting, *given):
        os.close(one)
    starting, given = moved[0], moved[1:]
    for one, number in zip(given, wanted, strict=True):
        os.dup2(one, number)
        os.close(one)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (*wanted, starting):
            _close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = path
    for limit, values in zip(programs.LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, tuple(values))
    _open_streams()
    _show_command(request["args"])
    if request["prepare"]:
        module, name = request["prepare"]
        getattr(importlib.import_module(module), name)()
    sys.orig_argv[:] = request["args"]
    os.write(starting, b"\0")
    os.close(starting)


def _import_what_tests_import() -> None:
    """Import what test files import of relaxd, and with it what takes long."""
    for file in (programs.ROOT / "tests").rglob("*.py"):
        for module in IMPORT.findall(file.read_text()):
            with contextlib.suppress(ImportError):  # a test of what isn't installed
                importlib.import_module(module)


def _above(descriptor: int, lowest: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the folder that was listed has a descriptor, too
        os.close(descriptor)


def _open_streams() -> None:
    """Open the standard streams as Python does when it starts."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="strict", closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw: Any = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr" or raw.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show_command(words: list[str]) -> None:
    """Show the program's command line where `ps` looks: in the memory that held the nursery's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    text = b"\0".join(word.encode() for word in words)[: last - first - 1]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, text, len(text))


def main() -> None:
    """Serve until the tests end."""
    _, name, descriptor, _ = sys.argv
    nursery = Nursery(name, socket.socket(fileno=int(descriptor)))
    start = nursery.serve()
    become(start, nursery.path(start.request))
    if name == "sglang":
        programs.install_spawning(name)
        streamer: Any = sys.modules[STREAMER]
        streamer.DEFAULT_FORCE_STREAM_INTERVAL = streamer.envs.SGLANG_FORCE_STREAM_INTERVAL.get()
    words = start.request["args"]
    names = sys.modules["__main__"].__dict__
    names.pop("nursery")
    if words[1] != "-m":  # multiprocessing's, and xdist's: python [options] -c CODE [--multiprocessing-fork]
        if words[-1] == programs.WORKER:  # pytest rewrites the asserts in what tests share
            for module in [name for name in sys.modules if name.startswith("tests.") and name != programs.__name__]:
                del sys.modules[module]
        option = words.index("-c")
        sys.argv[:] = ["-c", *words[option + 2 :]]
        exec(words[option + 1], names)
        return
    sys.argv[:] = ["-m", *words[3:]]
    run: Any = runpy
    run._run_module_as_main(words[2])  # what `python -m` calls
