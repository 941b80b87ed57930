"""`python -m services.launcher`: starts replicas as containers for the coordinator."""

import asyncio
import sys

from relaxd.replica.launcher_server import run_launcher
from relaxd.rpc.errors import RpcError
from relaxd.rpc.service_settings import parse_settings
from relaxd.telemetry.printable import escape_lines
from services.launcher.docker_host import DockerHost


def main() -> int:
    """Run the service. Returns the exit code."""
    settings = parse_settings("launcher")
    try:
        host = DockerHost(settings.project)
    except RpcError as error:
        print(escape_lines(f"launcher: {error.message}"), file=sys.stderr)
        return 1
    asyncio.run(run_launcher(host, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
