"""Finds the process that holds a port of this machine, and the stack to which the process belongs."""

from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from relaxd.local.state_folder import StateFolder
from relaxd.process.ports import LOOPBACK, is_free, reservation_name
from relaxd.rpc.client import sync_channel
from relaxd.rpc.errors import failed_precondition
from relaxd.rpc.stack_identity import STACK_VARIABLE
from relaxd.v1.replica_pb2 import GetStatusRequest
from relaxd.v1.replica_pb2_grpc import ReplicaStub

SUPERVISOR = "relaxd.local.supervisor"
NOBODY = "nobody"
"""Stack identity that no stack has. A server refuses calls with this identity by an error that names the server's
stack."""


@dataclass(frozen=True)
class PortHolder:
    """A process that listens on a port or has reserved it."""

    pid: int = 0
    """Pid of the process; 0 if it belongs to another user and can't be seen."""
    command: str = ""
    stack: str = ""
    """Identity of the stack to which the process belongs; empty if it belongs to none."""
    folder: Path | None = None
    """State folder of the process's stack, if a supervisor on this machine started the process."""

    def __str__(self) -> str:
        who = f"pid {self.pid}, {self.command}" if self.pid else "another user's process"
        place = f", in {self.folder}" if self.folder else ""
        return f"stack {self.stack}{place} ({who})" if self.stack else who


def find_holder(port: int, *, seconds: float = 1.0) -> PortHolder | None:
    """Return the process that listens on a loopback port or has reserved it; None if there is none.

    `seconds`: deadline of the call that asks another user's server for its stack, the only way to learn that.
    """
    at = [(address, port) for address in _ADDRESSES]
    name = "@" + reservation_name(LOOPBACK, port)
    try:
        connections = psutil.net_connections("tcp")
        listening = [one.pid for one in connections if one.status == psutil.CONN_LISTEN and one.laddr in at]
        pids = listening or [one.pid for one in psutil.net_connections("unix") if one.laddr == name]
    except psutil.AccessDenied:  # some systems show connections only to root
        return None if is_free(port) else PortHolder()
    if not pids:
        return None
    if pid := next(filter(None, pids), 0):
        return _describe(pid)
    return PortHolder(stack=ask_stack(f"{LOOPBACK}:{port}", seconds)) if listening else PortHolder()


def taken_port(port: int) -> str:
    """Return the error for a taken loopback port, which names the process that holds the port."""
    return f"port {port} on {LOOPBACK} is taken by {find_holder(port) or 'a process that has just ended'}"


_ADDRESSES = (LOOPBACK, "0.0.0.0", "::", "::1", f"::ffff:{LOOPBACK}")


def _describe(pid: int) -> PortHolder:
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        stack = process.environ().get(STACK_VARIABLE, "")
        above = [words for one in (process, *process.parents()) if SUPERVISOR in (words := one.cmdline())]
    except psutil.Error:  # it has ended
        return PortHolder(pid, "unknown")
    folder = Path(above[0][-1]).parent if above else None
    state = StateFolder(folder).read() if folder else None
    return PortHolder(pid, command[:80], stack or (state.stack if state else ""), folder)


def ask_stack(address: str, seconds: float) -> str:
    """Return the identity of a server's stack; empty if the server has none."""
    with sync_channel(address, token="", stack=NOBODY) as channel:  # a stranger gets no token
        try:
            ReplicaStub(channel).GetStatus(GetStatusRequest(), timeout=seconds)
        except grpc.RpcError as error:
            return failed_precondition(error, "STACK_MISMATCH")
    return ""
