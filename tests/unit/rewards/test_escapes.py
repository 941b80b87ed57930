"""Ways out of the sandbox, each on this kernel's Landlock and on older ones, where seccomp must hold alone."""

import fcntl
import os
import platform
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relaxd.sandbox import landlock
from relaxd.sandbox.limits import Limits
from relaxd.sandbox.processes import Ended, Sandbox, Stopped
from relaxd.sandbox.seccomp import ARGUMENTS, DENIED

COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)
TABLES = DENIED | ARGUMENTS
BEGIN = """
import ctypes, fcntl, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "denied")
def text(given):
    call.kept = ctypes.create_string_buffer(given if isinstance(given, bytes) else given.encode())
    return ctypes.addressof(call.kept)
a, b = socket.socketpair()
"""
OLD_ZYGOTE = """
from relaxd.sandbox import landlock
kernels = landlock.version
landlock.version = lambda: min(kernels(), {version})
from relaxd.sandbox import zygote
zygote.main()
"""

FCNTLS = {
    "F_SETOWN": "fcntl.fcntl(a, fcntl.F_SETOWN, {victim})",
    "F_SETOWN_EX": "fcntl.fcntl(a, 15, struct.pack('ii', 1, {victim}))",
    "F_SETSIG": "fcntl.fcntl(a, 10, 9)",
    "FIOSETOWN": "fcntl.ioctl(a, 0x8901, struct.pack('i', {victim}))",
    "SIOCSPGRP": "fcntl.ioctl(a, 0x8902, struct.pack('i', {victim}))",
    "FIOSETOWN with other bits above": "call({ioctl}, a.fileno(), 1 << 40 | 0x8901, text(struct.pack('i', {victim})))",
    "F_SETLEASE": "fcntl.fcntl(open(os.__file__), 1024, fcntl.F_RDLCK)",
    "F_NOTIFY": "fcntl.fcntl(os.open(os.path.dirname(os.__file__), 0), 1026, 0x80000002)",
    "a lock": "fcntl.flock(open(os.__file__), fcntl.LOCK_EX)",
    "a lock of a range": "fcntl.lockf(open(os.__file__), fcntl.LOCK_SH)",
    "a file's flags": "fcntl.ioctl(os.open(os.__file__, 0), 0x40086602, struct.pack('l', 0x80))",
    "a file frozen by fs-verity": "fcntl.ioctl(os.open(os.__file__, 0), 0x40806685, bytes(128))",
    "a terminal's input": "fcntl.ioctl(0, 0x5412, b'x')",
}
SOCKETS = {
    "a pair of datagram sockets": "c, d = socket.socketpair(type=socket.SOCK_DGRAM)\nc.sendto(b'out', {listener!r})",
    "a pair that keeps message borders": "socket.socketpair(type=socket.SOCK_SEQPACKET)",
    "a pair of another family": "socket.socketpair(socket.AF_INET)",
    "an address in sendto": "a.sendto(b'out', {listener!r})",
    "an address in sendmsg": "a.sendmsg([b'out'], [], 0, {listener!r})",
    "many messages": "call({sendmmsg}, a.fileno(), 0, 0, 0)",
    "a pair connected elsewhere": "a.connect({listener!r})",
    "a pair that listens": "a.listen()",
    "a name for a pair": "a.bind('\\0relaxd-answer')",
    "a local socket": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'out', {listener!r})",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + {listener!r})",
    "TCP": "socket.socket().connect(('127.0.0.1', 1))",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', 9))",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "io_uring": "call({io_uring_setup}, 1, text('\\0' * 200))",
}
PROCESSES = {
    "kill": "os.kill({victim}, 9)",
    "kill of everybody": "os.kill(-1, 9)",
    "kill of its group": "os.kill(0, 9)",
    "tkill": "call({tkill}, {victim}, 9)",
    "tgkill": "call({tgkill}, {victim}, {victim}, 9)",
    "a queued signal": "call({rt_sigqueueinfo}, {victim}, 9, text('\\0' * 200))",
    "a descriptor of a process": "os.pidfd_open({victim})",
    "a signal through a descriptor": "call({pidfd_send_signal}, 0, 9, 0, 0)",
    "ptrace": "call({ptrace}, 16, {victim}, 0, 0)",
    "another process's memory": "call({process_vm_readv}, {victim}, 0, 0, 0, 0, 0)",
    "another process's memory as a file": "open('/proc/{victim}/mem', 'rb').read(1)",
    "another process's environment": "open('/proc/{victim}/environ', 'rb').read()",
    "another process's limits": "call({prlimit64}, {victim}, 7, 0, text('\\0' * 16))",
    "another process's priority": "os.setpriority(os.PRIO_PROCESS, {victim}, 19)",
    "a fork": "os.fork() or os._exit(0)",
    "a fork by clone3": "call({clone3}, text('\\0' * 88), 88)",
    "a program": "os.execv('/bin/true', ['true'])",
    "a program in memory": "os.execve(os.memfd_create('p'), ['p'], {{}})",
    "the other set of calls": "call(0x40000000 + 39)",
    "a namespace": "call({unshare}, 0x10000000)",
}
FILES = {
    "reading a file": "open({file!r}).read()",
    "writing a file": "open({file!r}, 'a').write('x')",
    "truncating a file": "os.truncate({file!r}, 0)",
    "truncating a file by opening it": "os.open({file!r}, os.O_RDONLY | os.O_TRUNC)",
    "making a file": "open({file!r} + '.new', 'x')",
    "removing a file": "os.unlink({file!r})",
    "renaming a file": "os.rename({file!r}, {file!r} + '.new')",
    "linking a file": "os.link({file!r}, {file!r} + '.new')",
    "a symbolic link": "os.symlink({file!r}, {file!r} + '.new')",
    "a mode": "os.chmod({file!r}, 0o777)",
    "an owner": "os.chown({file!r}, os.getuid(), os.getgid())",
    "a time": "os.utime({file!r})",
    "an attribute": "os.setxattr({file!r}, 'user.x', b'x')",
    "a device": "os.mknod({file!r} + '.new')",
    "a watch on files": "call({inotify_add_watch}, 3, text('/tmp'), 0xfff)",
    "shared memory": "call({shmget}, 0, 4096, 0o1600)",
    "a queue of messages": "call({mq_open}, text('relaxd'), 0o102, 0o600, 0)",
    "a handle": "call({open_by_handle_at}, 3, 0, 0)",
    "writing out all disks": "call({syncfs}, 0)",
}
ESCAPES = FCNTLS | SOCKETS | PROCESSES | FILES


@pytest.fixture(scope="module", params=[1, 3, 5, None], ids=["Landlock 1", "Landlock 3", "Landlock 5", "this kernel's"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Sandbox on a kernel with a version of Landlock."""
    if not landlock.version():
        pytest.skip("needs Landlock")
    with pytest.MonkeyPatch.context() as patch, Sandbox(Limits(seconds=5)) as made:
        if request.param is not None:
            program = OLD_ZYGOTE.format(version=request.param)
            patch.setattr("relaxd.sandbox.processes.ZYGOTE", ("-c", program))
        yield made


@pytest.fixture(scope="module")
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that nobody may touch."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait(timeout=10)


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """A local socket whose address everybody may use."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        path = f"/tmp/relaxd-escapes-{os.getpid()}"
        made.bind(path)
        made.setblocking(False)
        try:
            yield made
        finally:
            os.unlink(path)


@pytest.fixture
def run(sandbox: Sandbox) -> Callable[[str], str]:
    """Run a program confined. Returns what it printed, or why it ended."""

    def _run(code: str) -> str:
        stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
        job = {"kind": "script", "programs": [code], "contest": False}
        try:
            process = sandbox.start(job, time.monotonic() + 30, stdin, stdout)
            try:
                found = process.receive()
            except Ended as error:
                return str(error)
            finally:
                process.end()
            return str(found.get("error") or os.pread(stdout, 1000, 0).decode())
        except Stopped as error:
            return str(error)
        finally:
            os.close(stdin)
            os.close(stdout)

    return _run


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes_fail(run, victim, listener, tmp_path: Path, name):
    (file := tmp_path / "file").write_text("secret")
    file.chmod(0o644)
    before = file.stat()
    numbers = {call: TABLES[call][COLUMN] for call in TABLES}
    code = ESCAPES[name].format(victim=victim.pid, listener=listener.getsockname(), file=str(file), **numbers)
    found = run(f"{BEGIN}\n{code}\nprint('escaped')")
    assert found in ("PermissionError", "OSError", "BlockingIOError"), found
    assert victim.poll() is None
    with pytest.raises(BlockingIOError):
        listener.recv(100)
    assert (file.read_text(), file.stat().st_mode, file.stat().st_mtime) == ("secret", before.st_mode, before.st_mtime)
    assert os.listdir(tmp_path) == ["file"]


def test_honest_programs_use_pairs_descriptors_and_threads(run):
    code = """
import asyncio, select, subprocess, sys, threading
async def main():
    await asyncio.gather(asyncio.sleep(0.01), asyncio.to_thread(int))
asyncio.run(main())
a.sendall(b"x"); assert b.recv(1) == b"x"
a.setblocking(False)
fcntl.fcntl(a, fcntl.F_SETFL, fcntl.fcntl(a, fcntl.F_GETFL) | os.O_ASYNC)
fcntl.ioctl(a, 0x541B, bytes(4))
os.set_inheritable(a.fileno(), True); os.set_blocking(b.fileno(), False); os.dup(a.fileno())
assert not sys.stdin.isatty()
try: os.get_terminal_size()
except OSError: pass
r, w = os.pipe(); os.write(w, b"x"); assert select.select([r], [], [], 1)[0]
thread = threading.Thread(target=print, args=("honest",)); thread.start(); thread.join()
"""
    assert run(BEGIN + code) == "honest\n"


def test_the_kernel_would_allow_what_is_denied(victim, listener):
    """Else the escapes would fail without the filter, too."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        fcntl.fcntl(ours, fcntl.F_SETOWN, victim.pid)
        fcntl.ioctl(ours, 0x8901, struct.pack("i", victim.pid))
        other.sendto(b"out", listener.getsockname())
        assert listener.recv(100) == b"out"
