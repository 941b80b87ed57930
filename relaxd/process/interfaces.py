"""This machine's addresses and network interfaces on the routes to other machines."""

import socket

import psutil


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
