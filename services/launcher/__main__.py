"""`python -m services.launcher`: start replicas as containers, when the coordinator asks."""

import asyncio
import sys

from relaxd.replica.launcher import run_launcher
from relaxd.rpc.errors import RpcError
from relaxd.rpc.settings import parse_settings
from services.launcher.host import DockerHost


def main() -> int:
    """Run the service; returns the exit code."""
    settings = parse_settings("launcher")
    try:
        host = DockerHost(settings.project)
    except RpcError as error:
        print(f"launcher: {error.message}", file=sys.stderr)
        return 1
    asyncio.run(run_launcher(host, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
