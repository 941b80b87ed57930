"""Ports on which the trainer's processes meet: any free one, or one of a fixed range (weights.ports)."""

import errno
import random
import socket
from collections.abc import Sequence


class NoFreePort(OSError):
    """Something listens on every port of the range."""


def listen(host: str, ports: Sequence[int] | None) -> socket.socket:
    """Listen on a free port of a host: the first of `ports`, or without them any. Raises NoFreePort, OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (0,) if ports is None else ports:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
    assert ports is not None
    raise NoFreePort(
        f'weights.ports is "{min(ports)}-{max(ports)}", but something listens on each of these {len(ports)} ports of '
        f"{host}: give a larger range, or one for each trainer on this machine"
    )


def free_port(host: str, ports: range | None) -> int:
    """Return a port on which a process of this machine can listen next. Raises NoFreePort.

    Of a range it is any free one, so that replicas that start at the same time hardly ever choose the same.
    """
    with listen(host, None if ports is None else random.sample(ports, len(ports))) as listener:
        return int(listener.getsockname()[1])
