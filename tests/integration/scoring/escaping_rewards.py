"""Rewards that use what a worker may not have; what one does is the text of the response."""

import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path


def by_response(sample, data: str = "") -> float:
    """Do as the response says."""
    action, _, argument = sample.response.partition(" ")
    ACTIONS[action](argument)
    return 1.0


def connect(port: str) -> None:
    """Connect to a port of this machine."""
    socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()


def write(path: str) -> None:
    """Write a file."""
    Path(path).write_text("written")


def write_table(path: str) -> None:
    """Write a table of SQLite, whose errors have no number."""
    sqlite3.connect(path).execute("create table one (number)")


def write_tensors(path: str) -> None:
    """Write a file from Rust."""
    import numpy
    from safetensors.numpy import save_file

    save_file({"one": numpy.ones(1)}, path)


def run(*words: str) -> None:
    """Run a program that may fail."""
    subprocess.run(words, check=True, capture_output=True)


def write_temporary(size: str) -> None:
    """Write a temporary file."""
    with tempfile.TemporaryFile() as file:
        for _ in range(int(size) >> 20):
            file.write(bytes(1 << 20))


def keep_temporary(_: str) -> None:
    """Leave a temporary file, and say where."""
    handle, path = tempfile.mkstemp()
    os.close(handle)
    raise ValueError(f"a file in {os.path.dirname(path)}")


def use_much_together(_: str) -> None:
    """Use what rewards use: threads, processes, locks in shared memory."""
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    assert subprocess.run(["echo", "hello"], capture_output=True, check=True).stdout == b"hello\n"


ACTIONS = {
    "one": lambda _: None,
    "connect": connect,
    "resolve": lambda name: socket.getaddrinfo(name, 80),
    "read": lambda path: Path(path).read_text(),
    "write": write,
    "sqlite": write_table,
    "safetensors": write_tensors,
    "run-touch": lambda path: run("touch", path),
    "run-python": lambda code: run(sys.executable, "-c", code),
    "temporary": write_temporary,
    "allocate": lambda size: len(bytearray(int(size))),
    "keep-temporary": keep_temporary,
    "use": use_much_together,
    "environment-of": lambda pid: Path(f"/proc/{pid}/environ").read_bytes(),
    "signal": lambda pid: os.kill(int(pid), 0),
    "unshare": lambda _: subprocess.run(["unshare", "--user", "true"], check=True),
}
