"""How a server is entered: on which address, by whom, over what."""

import ipaddress
import socket
from dataclasses import dataclass, field

from relaxd.rpc.access import Tokens
from relaxd.rpc.errors import ServerError
from relaxd.rpc.tls import TlsFiles


@dataclass(frozen=True)
class Doors:
    """What a server asks of its callers."""

    tokens: Tokens | None = None
    """Who may call what; None: everyone everything."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """Its certificate, if it has one."""
    allow_insecure: bool = False
    """Listen beyond loopback without knowing who calls."""

    def check(self, host: str) -> None:
        """Raise ServerError when anyone who reaches `host` could call, and nobody said that this is fine."""
        if self.tokens or self.tls.client_authority or self.allow_insecure or is_loopback(host):
            return
        raise ServerError(
            f"refusing to listen on {host or 'every address'} without authentication: whoever reaches it could start "
            "runs, which run code. Set a token (RELAXD_TOKEN_FILE or RELAXD_TOKENS_FILE) or ask for clients' "
            "certificates (--tls-client-authority / RELAXD_TLS_CLIENT_AUTHORITY); in a network where everyone is "
            "trusted, --allow-insecure / RELAXD_ALLOW_INSECURE=1 (docs/security.md)"
        )


def is_loopback(host: str) -> bool:
    """Whether a server that listens on a host (a name or an address) can be reached from this machine only."""
    if not host:
        return False  # every address
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)
