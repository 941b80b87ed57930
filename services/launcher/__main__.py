"""`python -m services.launcher`: starts replicas as containers or pods for the coordinator."""

import asyncio
import sys

from relaxd.replica.launcher_server import Host, run_launcher
from relaxd.rpc.errors import RpcError
from relaxd.rpc.service_settings import ServiceSettings, parse_settings
from relaxd.telemetry.logs import escape_lines
from services.launcher.docker_host import DockerHost
from services.launcher.kubernetes_host import KubernetesApi, KubernetesHost


def main() -> int:
    """Run the launcher service. Returns the exit code."""
    settings = parse_settings("launcher")
    try:
        host = _host(settings)
    except RpcError as error:
        print(escape_lines(f"launcher: {error.message}"), file=sys.stderr)
        return 1
    asyncio.run(run_launcher(host, settings))
    return 0


def _host(settings: ServiceSettings) -> Host:
    if settings.platform == "kubernetes":
        return KubernetesHost(KubernetesApi.of_pod(), settings.project)
    return DockerHost(settings.project)


if __name__ == "__main__":
    sys.exit(main())
