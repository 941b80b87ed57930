"""TLS and mutual TLS: files, gRPC credentials and diagnosis of failed connections."""

import logging
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

PROBE_SECONDS = 1.0
"""Maximum seconds to connect to a server in order to explain why a call failed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """Paths of a process's PEM files; all empty: no TLS."""

    certificate: str = ""
    """File with the process's certificate, then intermediate ones; shown to callers, and to servers that ask for it."""
    key: str = ""
    """File with the certificate's unencrypted private key."""
    ca: str = ""
    """File with the CA certificates by which this process verifies servers. If set, all its calls use TLS."""
    client_ca: str = ""
    """File with the CA certificates by which this process's server verifies callers. If set, callers need a
    certificate."""
    name: str = ""
    """Host name that servers' certificates must contain; empty: the host of the called address."""

    @classmethod
    def from_environment(cls) -> "TlsFiles":
        """Return the TLS files that the environment names: RELAXD_TLS_CERTIFICATE, _KEY, _CA, _CLIENT_CA and _NAME."""
        return cls(**{field: os.environ.get(f"RELAXD_TLS_{field.upper()}", "") for field in cls.__dataclass_fields__})

    def check(self) -> None:
        """Raise ValueError unless the TLS files exist, are valid, and certificate and key match."""
        if bool(self.certificate) != bool(self.key):
            missing, given = ("key", "certificate") if self.certificate else ("certificate", "key")
            raise ValueError(f"{_setting(given)} is set, but not {_setting(missing)}")
        if self.client_ca and not self.certificate:
            raise ValueError(f"{_setting('client_ca')} is set, but not {_setting('certificate')}")
        if self.name and not self.ca:
            raise ValueError(f"{_setting('name')} is set, but not {_setting('ca')}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.certificate:
            _readable("certificate", self.certificate)
            _readable("key", self.key)
            try:
                context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
            except ssl.SSLError as error:
                raise ValueError(
                    f"{self.certificate} and {self.key} must be a certificate and its unencrypted private key, "
                    f"both PEM: {error.reason or error}"
                ) from error
        for field in ("ca", "client_ca"):
            if file := getattr(self, field):
                _readable(field, file)
                try:
                    context.load_verify_locations(file)
                except ssl.SSLError as error:
                    raise ValueError(f"{_setting(field)}: {file} has no PEM certificate") from error


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Create a server's TLS credentials. When the files change, new connections use the changed files.

    Raises ValueError: see TlsFiles.check.
    """
    files.check()
    return grpc.dynamic_ssl_server_credentials(
        _configuration(files), _Renewal(files), require_client_authentication=bool(files.client_ca)
    )


def open_channel(kind: Any, address: str, options: list[tuple[str, Any]], files: TlsFiles) -> Any:
    """Open a channel of `kind` (grpc or grpc.aio), over TLS if `files` has a CA.

    Raises ValueError: see TlsFiles.check.
    """
    if not files.ca:
        return kind.insecure_channel(address, options=options)
    files.check()
    pair = (Path(files.key).read_bytes(), Path(files.certificate).read_bytes()) if files.certificate else (None, None)
    credentials = grpc.ssl_channel_credentials(Path(files.ca).read_bytes(), *pair)
    if files.name:
        options = [*options, ("grpc.ssl_target_name_override", files.name)]
    return kind.secure_channel(address, credentials, options=options)


def connection_hint(address: str, details: str, files: TlsFiles) -> str:
    """Explain the TLS problem with a server that gRPC calls UNAVAILABLE; "" if there is none.

    Args:
        address: host:port of the server.
        details: the details of gRPC's error.
        files: the caller's TLS files.

    May connect to the server for up to a second.
    """
    if not files.ca:
        if not _probe(address, files):
            return ""
        return f"it uses TLS: set {_setting('ca')} to the CA of its certificate"
    if "WRONG_VERSION_NUMBER" in details:
        return f"it does not use TLS: unset {_setting('ca')}, or give it a certificate"
    if "certificate has expired" in details:
        return "its certificate has expired: renew it"
    if "Hostname Verification" in details:
        name = files.name or address.rpartition(":")[0]
        return f"its certificate is not for {name}: call it by a name in the certificate, or set {_setting('name')}"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"its certificate is not signed by a CA in {files.ca} ({_setting('ca')})"
    if _probe(address, files) == "refused":
        if not files.certificate:
            return f"it requires a client certificate: set {_setting('certificate')} and {_setting('key')}"
        return f"it rejects the certificate in {files.certificate}: expired, or not signed by its client CA"
    return ""


def _probe(address: str, files: TlsFiles) -> str:
    """Attempt a TLS handshake with the server at an address, presenting this process's certificate.

    Returns "" if no TLS server answers, "refused" if the server rejects the client, else "accepted".
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Only the result of the handshake matters: nothing is sent or trusted.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        if files.certificate:
            context.load_cert_chain(files.certificate, files.key)
        with (
            socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS) as plain,
            context.wrap_socket(plain) as secure,
        ):
            # With TLS 1.3 the server checks the client's certificate after the handshake; if it accepts, it sends
            # first.
            try:
                return "accepted" if secure.recv(1) else "refused"
            except TimeoutError:
                return "accepted"
            except OSError:
                return "refused"
    except ssl.SSLError as error:
        return "refused" if "ALERT" in (error.reason or "") else ""
    except (OSError, ValueError):
        return ""


class _Renewal:
    """Callback that gRPC calls at each TLS handshake of a server. Returns the new certificate configuration if the TLS
    files have changed, else None."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = self._stamps()

    def __call__(self) -> Any:
        stamp = self._stamps()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self._files.check()
            configuration = _configuration(self._files)
        except (OSError, ValueError) as error:
            _log.error("still using the former certificate: %s", error)
            return None
        _log.info("%s has changed: using it from now on", self._files.certificate)
        return configuration

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        stamps: list[tuple[int, int, int] | None] = []
        for file in filter(None, (self._files.certificate, self._files.key, self._files.client_ca)):
            try:
                status = os.stat(file)
                stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
            except OSError:
                stamps.append(None)
        return stamps


def _configuration(files: TlsFiles) -> Any:
    clients = Path(files.client_ca).read_bytes() if files.client_ca else None
    pair = (Path(files.key).read_bytes(), Path(files.certificate).read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=clients)


def _readable(field: str, file: str) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise ValueError(f"{_setting(field)}: cannot read {file}: {error.strerror}") from error


def _setting(field: str) -> str:
    name = "tls_" + field
    return f"--{name.replace('_', '-')} / RELAXD_{name.upper()}"
