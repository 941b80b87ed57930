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


def reserve(port: int, host: str = LOOPBACK) -> bool:
    """Reserve a port like `free_port`; returns False if something listens on it, or another process reserved it."""
    if any(reserved.number == port for reserved in _reserved):
        return True
    try:
        _reserved.append(ReservedPort(host, port))
    except OSError:
        return False
    return True


def reservations() -> list[int]:
    """Return the file descriptors that reserve ports, for a process that is to go on reserving them."""
    return [fd for reserved in _reserved for fd in reserved.filenos()]


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return True if a server can listen on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
