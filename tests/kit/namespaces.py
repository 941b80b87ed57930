"""Nodes on one machine: network namespaces with an interface each, joined by a bridge in one more namespace.

Needs root and iproute2. Nothing is routed out of the namespaces.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INTERFACE = "eth0"
TEST_NET = "192.0.2"
"""TEST-NET-1, which is routed nowhere."""


class NamespacesUnavailable(Exception):
    """No network namespace can be made here; the message is the reason."""


@dataclass(frozen=True)
class Node:
    """A namespace with one interface."""

    name: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs `words` in this node."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Pull the cable: what is on its way is lost, and nobody is told."""
        _ip("-n", self.name, "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.name, "link", "set", INTERFACE, "up")

    def add_interface(self, name: str, address: str) -> None:
        """Add an interface that leads nowhere, with an address such as 10.0.0.1/24."""
        _ip("-n", self.name, "link", "add", name, "type", "veth", "peer", "name", f"{name}-end")
        _ip("-n", self.name, "link", "set", f"{name}-end", "up")
        _ip("-n", self.name, "addr", "add", address, "dev", name)
        _ip("-n", self.name, "link", "set", name, "up")

    def pids(self) -> list[int]:
        """Return the process ids of the node's programs."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kill all programs of the node at once, as a loss of power would."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def namespaces(count: int, subnet: str = TEST_NET, *, reachable: bool = False) -> Iterator[list[Node]]:
    """Yield nodes with the addresses SUBNET.1, SUBNET.2, and so on; they are removed afterwards.

    If they are `reachable`, this machine itself has the address SUBNET.254 beside them. Raises NamespacesUnavailable.
    """
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise NamespacesUnavailable("network namespaces need root and iproute2")
    mark = f"rx{os.getpid()}"
    switch = f"{mark}-switch"
    nodes = [Node(f"{mark}-node{number}", f"{subnet}.{number + 1}") for number in range(count)]
    with contextlib.ExitStack() as stack:
        for name in [switch, *(node.name for node in nodes)]:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                raise NamespacesUnavailable(f"no network namespace can be made: {error.stderr.strip()}") from error
            stack.callback(_ip, "netns", "del", name)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number, node in enumerate(nodes):
            port = f"port{number}"
            inside = ("-n", node.name)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            _ip(*inside, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
            _ip(*inside, "link", "set", INTERFACE, "up")
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
        if reachable:
            _ip("link", "add", mark, "type", "veth", "peer", "name", "port-out", "netns", switch)
            stack.callback(_ip, "link", "del", mark)
            _ip("addr", "add", f"{subnet}.254/24", "dev", mark)
            _ip("link", "set", mark, "up")
            _ip("-n", switch, "link", "set", "port-out", "master", "bridge0", "up")
        yield nodes


def _ip(*words: str) -> str:
    """Run iproute2's ip and return its output. Raises CalledProcessError."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60).stdout
