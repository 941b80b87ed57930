"""Ports for processes of this machine, any free port or one of a fixed range (weights.ports), and this machine's
addresses and network interfaces on the routes to other machines.

A port is reserved if another process listens on it later, after loading its code: otherwise the system may assign it to
any process that requests a free port meanwhile.
"""

import errno
import random
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import psutil

Bound = TypeVar("Bound")


class NoFreePort(OSError):
    """Every port of the given range is taken: a process listens on it or has reserved it."""


class ReservedPort:
    """Reservation of a port on which a process of this machine will listen later. A context manager.

    While a socket is bound to a port, Linux doesn't assign it to processes that request any free port, but lets a
    server listen on it if both sockets have SO_REUSEADDR. On systems that refuse this, the port isn't held: it was free
    when chosen. To keep two processes from reserving one port, each also binds an abstract Unix socket named after the
    port, which disappears with the process.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        """Reserve a port of a host, by default any free port. Raises OSError if a process listens on the port, or
        another process reserved it."""
        family = _family(host)
        self._holder = socket.socket(family)
        try:
            self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._holder.bind((host, port))
            self.number: int = self._holder.getsockname()[1]
            self._claim = _claim(host, self.number)
        except BaseException:
            self._holder.close()
            raise
        try:
            socket.create_server((host, self.number), family=family).close()
        except OSError:
            self._holder.close()

    def filenos(self) -> list[int]:
        """Return the open file descriptors of the reservation. A process that inherits them keeps the port reserved."""
        return [one.fileno() for one in (self._holder, self._claim) if one is not None and one.fileno() >= 0]

    def close(self) -> None:
        """Release the reserved port."""
        self._holder.close()
        if self._claim is not None:
            self._claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def listen(host: str, ports: Sequence[int] | None) -> socket.socket:
    """Listen on a free port of a host: the first free port of `ports`, or any if `ports` is None. Raises NoFreePort,
    OSError."""
    return _first(host, ports, lambda port: socket.create_server((host, port), family=_family(host)))


def reserve_port(host: str, ports: range | None) -> ReservedPort:
    """Reserve a port on which a process of this machine will listen. Raises NoFreePort, OSError.

    Ports of a range are tried in random order, so that replicas that start at the same time rarely try the same port.
    """
    sample = None if ports is None else random.sample(ports, len(ports))
    return _first(host, sample, lambda port: ReservedPort(host, port))


def _first(host: str, ports: Sequence[int] | None, bind: Callable[[int], Bound]) -> Bound:
    for port in (0,) if ports is None else ports:
        try:
            return bind(port)
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
    assert ports is not None
    raise NoFreePort(
        f'weights.ports is "{min(ports)}-{max(ports)}", but something listens on each of these {len(ports)} ports of '
        f"{host}: give a larger range, or one for each trainer on this machine"
    )


def reservation_name(host: str, port: int) -> str:
    """Return the name of the abstract Unix socket that reserves a port."""
    return f"relaxd-port-{host}-{port}"


def _claim(host: str, port: int) -> socket.socket | None:
    """Bind the abstract Unix socket that reserves a port. Raises OSError if another process has bound it."""
    if sys.platform != "linux":
        return None
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind("\0" + reservation_name(host, port))
    except BaseException:
        claim.close()
        raise
    return claim


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


LOOPBACK = "127.0.0.1"
_reserved: list[ReservedPort] = []
"""Ports that stay reserved until this process ends: its services listen on them later, or again after a restart."""


def free_port(host: str = LOOPBACK) -> int:
    """Return a port on which nothing listens, and reserve it until this process ends."""
    _reserved.append(ReservedPort(host))
    return _reserved[-1].number


def reserve(port: int, host: str = LOOPBACK) -> bool:
    """Reserve a port until this process ends. Returns False if a process listens on it, or another has reserved it."""
    if any(reserved.number == port for reserved in _reserved):
        return True
    try:
        _reserved.append(ReservedPort(host, port))
    except OSError:
        return False
    return True


def reservations() -> list[int]:
    """Return the file descriptors that reserve this process's ports, so that another process can inherit them."""
    return [fd for reserved in _reserved for fd in reserved.filenos()]


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return True if a server can listen on `port`."""
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


REACH_SECONDS = 1.5
"""Timeout of connecting to another machine, in seconds: long enough to resend a lost packet, after 1 s."""


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to `host` (connecting a UDP socket sends nothing). Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_towards(host: str, port: int) -> str:
    """Return the name of this machine's interface on the route to `host`. Raises OSError."""
    own = address_towards(host, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return name
    raise OSError(f"no network interface has the address {own}, which is on the route to {host}")


def check_reaches(interfaces: str, host: str, port: int) -> None:
    """Check that a connection from each of these interfaces, separated by commas, reaches `host`.

    The connection may be refused: nothing has to listen on `port`. Raises OSError with the missing interface, or the
    address that isn't reached.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    present = psutil.net_if_addrs()
    for name in interfaces.split(","):
        own = next((one.address for one in present.get(name, []) if one.family == family), None)
        if own is None:
            raise OSError(
                f"no interface {name!r} with an {family.name} address is on this machine, which has "
                f"{', '.join(sorted(present))}"
            )
        try:
            socket.create_connection((str(target[0]), port), REACH_SECONDS, source_address=(own, 0)).close()
        except ConnectionRefusedError:
            pass
        except OSError as error:
            raise OSError(f"{host}:{port} is not reached from interface {name} ({own}): {error}") from error
