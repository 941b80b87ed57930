"""This machine's addresses and network interfaces on the routes to other machines."""

import socket

import psutil

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
