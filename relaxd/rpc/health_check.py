"""`python -m relaxd.rpc.health_check`: whether a service of this machine serves, for container health checks.

It imports gRPC and nothing else: a container is asked every few seconds.
"""

import os
import sys

import grpc

SERVING = b"\x08\x01"
"""grpc.health.v1.HealthCheckResponse with status SERVING, on the wire."""
SECONDS = 2.0
"""How long the service may take to answer."""


def check(address: str, seconds: float = SECONDS) -> str:
    """ "" when the service at `address` (host:port) serves, else what is wrong."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        try:
            # An empty HealthCheckRequest asks about the server as a whole.
            answer = ask(b"", timeout=seconds)
        except grpc.RpcError as error:
            return f"{address} does not answer: {error.code().name}: {error.details()}"
    return "" if answer == SERVING else f"{address} does not serve: it starts, drains or has no coordinator"


def main() -> int:
    """Check the address given as argument, else loopback at RELAXD_PORT; returns the exit code."""
    address = sys.argv[1] if len(sys.argv) > 1 else f"127.0.0.1:{os.environ.get('RELAXD_PORT') or 50050}"
    problem = check(address)
    print(problem or f"{address} serves")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
