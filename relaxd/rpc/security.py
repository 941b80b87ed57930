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
        """Raise ServerError when anyone who reaches `host` could call, or guess the token that it takes to call.

        A server on loopback may do as it likes, and so may one that was told to (allow_insecure).
        """
        if self.allow_insecure or is_loopback(host):
            return
        where = f"refusing to listen on {host or 'every address'}"
        trusted = (
            "in a network where everyone is trusted, --allow-insecure / RELAXD_ALLOW_INSECURE=1 (docs/security.md)"
        )
        if self.tokens is not None:
            try:
                self.tokens.refuse_weak()
            except ValueError as error:
                raise ServerError(f"{where}: {error}. Make one with `openssl rand -hex 32`; {trusted}") from None
        elif not self.tls.client_ca:
            raise ServerError(
                f"{where} without authentication: whoever reaches it could start runs, which run code. Set a token "
                "(RELAXD_TOKEN_FILE or RELAXD_TOKENS_FILE) or ask for clients' certificates (--tls-client-ca / "
                f"RELAXD_TLS_CLIENT_CA); {trusted}"
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
