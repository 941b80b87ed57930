"""`python -m relaxd.rpc.health_check`: check that a service on this machine serves, for container health checks.

It imports only gRPC, because containers run it every few seconds.
"""

import os
import sys
from pathlib import Path

import grpc

SERVING = b"\x08\x01"
"""Serialized grpc.health.v1.HealthCheckResponse with status SERVING."""
SECONDS = 6.0
"""Deadline of the health check's call, in seconds. Containers allow ten seconds, of which starting Python on a busy
machine takes a part."""


def check(address: str, seconds: float = SECONDS) -> str:
    """Return "" if the service at `address` (host:port) reports SERVING, else what is wrong."""
    try:
        opened = _channel(address)
    except OSError as error:
        return f"the TLS files cannot be read: {error}"
    with opened as channel:
        ask = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        try:
            # An empty HealthCheckRequest checks the server as a whole.
            answer = ask(b"", timeout=seconds)
        except grpc.RpcError as error:
            return f"{address} does not answer: {error.code().name}: {error.details()}"
    return "" if answer == SERVING else f"{address} does not serve: it is starting, draining or without a coordinator"


def _channel(address: str) -> grpc.Channel:
    """Open a channel, over TLS if the environment has the service's TLS settings."""
    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]
    files = {name: os.environ.get(f"RELAXD_TLS_{name}") for name in ("CA", "KEY", "CERTIFICATE")}
    if not files["CA"]:
        return grpc.insecure_channel(address, options=options)
    # The certificate has the name by which others call the service; here it is called by address.
    options.append(("grpc.ssl_target_name_override", os.environ.get("RELAXD_TLS_NAME") or "localhost"))
    credentials = grpc.ssl_channel_credentials(*(Path(file).read_bytes() if file else None for file in files.values()))
    return grpc.secure_channel(address, credentials, options=options)


def main() -> int:
    """Check the service at the address given as argument, else at RELAXD_PORT on loopback. Returns the exit code."""
    address = sys.argv[1] if len(sys.argv) > 1 else f"127.0.0.1:{os.environ.get('RELAXD_PORT') or 50050}"
    problem = check(address)
    print(problem or f"{address} serves")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
