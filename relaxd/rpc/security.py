"""Server security: bind address, tokens, TLS."""

import ipaddress
import socket
from dataclasses import dataclass, field

from relaxd.rpc.access.tokens import AccessTokens
from relaxd.rpc.errors import ServerError
from relaxd.rpc.tls import TlsFiles


@dataclass(frozen=True)
class ServerSecurity:
    """Authentication of a server's callers."""

    tokens: AccessTokens | None = None
    """Accepted tokens; None accepts every call."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """The server's certificate, if any."""
    allow_insecure: bool = False
    """Allow listening beyond loopback without authentication."""

    def check(self, host: str) -> None:
        """Raise ServerError if the server would be open to anyone who reaches `host`, or its tokens are guessable.

        Loopback and allow_insecure are exempt.
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
                f"{where} without authentication: anyone who reaches it could start runs, which run code. Set a token "
                "(RELAXD_TOKEN_FILE or RELAXD_TOKENS_FILE) or require client certificates (--tls-client-ca / "
                f"RELAXD_TLS_CLIENT_CA); {trusted}"
            )


def is_loopback(host: str) -> bool:
    """Return True if a server that listens on `host` (name or address) is reachable from this machine only."""
    if not host:
        return False  # every address
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)
