"""Free ports of this machine."""

import socket

from relaxd.weights.ports import ReservedPort

LOOPBACK = "127.0.0.1"
_reserved: list[ReservedPort] = []
"""They stay reserved: services that this process starts listen on them later, or again after a restart."""


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that nothing listens on, and that nobody else gets who asks for any while this process lives."""
    _reserved.append(ReservedPort(host))
    return _reserved[-1].number


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return True if a server can listen on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
