"""TCP ports for servers that tests start."""

import contextlib
import socket


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
