"""TCP ports for servers that tests start."""

import contextlib
import socket

from relaxd.rpc.service_settings import COORDINATOR_PORT


class _Ports:
    """A block of ports that this process alone hands out.

    A port that was bound and closed again can go to another process before its server listens. So each process claims a
    block for as long as it lives, by listening on its first port; all are below the kernel's ephemeral range.
    """

    FIRST, LAST, BLOCK = 12_000, 32_000, 250

    def __init__(self) -> None:
        self._claim: socket.socket | None = None
        self._next = 0

    def take(self) -> int:
        """The next port of the block that nothing listens on."""
        if self._claim is None:
            self._claim = self._claim_block()
        first = self._claim.getsockname()[1]
        for _ in range(self.BLOCK - 1):
            port = first + 1 + self._next % (self.BLOCK - 1)
            self._next += 1
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                return port
        raise RuntimeError(f"all ports of {first + 1}..{first + self.BLOCK - 1} are taken")

    def _claim_block(self) -> socket.socket:
        for port in range(self.FIRST, self.LAST, self.BLOCK):
            claim = socket.socket()
            try:
                claim.bind(("127.0.0.1", port))
                claim.listen()
            except OSError:
                claim.close()
            else:
                return claim
        raise RuntimeError(f"every block of ports in {self.FIRST}..{self.LAST} is taken by other test processes")


_ports = _Ports()


def free_port() -> int:
    """A TCP port on loopback that nothing listens on, and that no other test process is given."""
    return _ports.take()


_default_port: list[socket.socket] = []


def occupy_default_port() -> None:
    """Bind the coordinator's default port while this process lives, so that every stack takes a port of its own.

    Stacks that start at the same time would all find the default port free, and meet there. Several test processes can
    occupy it at once; nobody listens on it, so connections are refused as ever.
    """
    if not _default_port:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind(("127.0.0.1", COORDINATOR_PORT))
        except OSError:  # taken by a server: stacks that start now see that themselves
            holder.close()
        else:
            _default_port.append(holder)
