"""Credentials of a process: secrets, certificates and the bind address of its server, from files and the environment,
never from arguments.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from relaxd.rpc.access import ADMIN, AccessTokens
from relaxd.rpc.errors import ServerError
from relaxd.rpc.tls import TlsFiles

REDIS_FILES = {"ca": "ssl_ca_certs", "certificate": "ssl_certfile", "key": "ssl_keyfile"}
"""For each kind of TLS file for Redis: the parameter in the query of redis-py's URLs that names the file."""


def read_token(
    token_file: str = "", environment: Mapping[str, str] | None = None, variable: str = "RELAXD_TOKEN"
) -> str | None:
    """Read the bearer token from a file, else from `variable`, else from the file named by `variable`_FILE, else None.

    Raises OSError when the file cannot be read, ValueError when the token is empty or not printable ASCII.
    """
    environment = os.environ if environment is None else environment
    token_file = token_file or ("" if environment.get(variable) else environment.get(f"{variable}_FILE", ""))
    if token_file:
        token, source = Path(token_file).read_text(encoding="utf-8").strip(), token_file
    else:
        token, source = environment.get(variable, "").strip(), variable
        if not token:
            return None
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(f"the token in {source} is empty or not printable ASCII")
    return token


def read_tokens(role: str, file: str, token: str | None) -> AccessTokens | None:
    """Read the file of access tokens that this service accepts; None if `file` is "".

    `token` is the token with which this service calls others. Raises OSError if the file can't be read, ValueError if
    it is invalid, or lacks `token` with this service's role or the role admin.
    """
    if not file:
        return None
    tokens = AccessTokens(Path(file))
    if role != "launcher":  # it calls no other service
        found = tokens.caller(token) if token else None
        if found is None or found.role not in (role, ADMIN):
            problem = "it isn't there" if found is None else f'"{found.name}" is for {found.role}'
            raise ValueError(
                f"this service needs a token of its own (RELAXD_TOKEN or RELAXD_TOKEN_FILE) that {file} has for the "
                f"role {role}, or for admin: {'there is none' if token is None else problem}"
            )
    return tokens


def read_tls(role: str, values: Mapping[str, str]) -> TlsFiles:
    """Return the TLS files of a service with this role. Raises ValueError if they are invalid or incomplete."""
    tls = TlsFiles(**values)
    tls.check()
    if role not in ("launcher", "console") and bool(tls.certificate) != bool(tls.ca):
        missing, given = ("ca", "certificate") if tls.certificate else ("certificate", "ca")
        raise ValueError(
            f"RELAXD_TLS_{given.upper()} is set, but not RELAXD_TLS_{missing.upper()}: a service uses TLS "
            "both as a server and as a client, or not at all"
        )
    return tls


def with_certificates(redis_url: str, files: Mapping[str, str]) -> str:
    """Return a Redis URL with TLS files ("ca", "certificate", "key"; "" for none) added to its query.

    Raises OSError if a file can't be read, ValueError if the URL isn't rediss://.
    """
    parts = urlsplit(redis_url)
    there = parse_qs(parts.query)
    given = {REDIS_FILES[name]: file for name, file in files.items() if file and REDIS_FILES[name] not in there}
    if not given:
        return redis_url
    if parts.scheme.partition("+")[0] != "rediss":
        raise ValueError(f"TLS files for Redis need a rediss:// URL, not {parts.scheme}://")
    for file in given.values():
        with open(file, "rb"):
            pass
    query = "&".join(filter(None, [parts.query, *(f"{name}={quote(file)}" for name, file in given.items())]))
    return parts._replace(query=query).geturl()


def with_password(redis_url: str, file: str) -> str:
    """Return a Redis URL with the password from a file added; unchanged if `file` is "". Raises OSError, ValueError."""
    if not file:
        return redis_url
    password = Path(file).read_text(encoding="utf-8").strip()
    parts = urlsplit(redis_url)
    if not password:
        raise ValueError(f"the Redis password in {file} is empty")
    if parts.scheme == "unix" or parts.password:
        raise ValueError(f"a Redis password file ({file}) needs a redis:// URL without a password")
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()


@dataclass(frozen=True)
class ServerSecurity:
    """Authentication of callers by a server: access tokens and TLS."""

    tokens: AccessTokens | None = None
    """Access tokens that the server accepts; None: calls need no token."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """The server's certificate and key, and the CA for clients; without a certificate the server doesn't use TLS."""
    allow_insecure: bool = False
    """True to allow that a server without authentication listens on more than the loopback interface."""

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
