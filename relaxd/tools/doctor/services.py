"""Checks of the services that are up."""

from collections import Counter
from collections.abc import Iterator, Sequence

from relaxd import PROTOCOL_VERSION, __version__
from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.tools.doctor.finding import Finding, Scope
from relaxd.v1.replica_pb2 import REPLICA_STATE_FAILED, ReplicaStatus


def check_services(scope: Scope) -> Iterator[Finding]:
    """Check that the services that are up work, and have this command's version."""
    stack = scope.folder.read()
    for service in stack.failed() if stack else ():
        yield Finding(
            "problem",
            service.name,
            f"it kept dying (exit code {service.exit_code}) and is no longer restarted",
            "its log says why",
            f"relaxd logs {service.name}",
        )
    if scope.coordinator is None:
        yield Finding("ok", "services", f"none are up here (in {scope.folder.path})")
        return
    try:
        with CoordinatorClient(scope.coordinator) as client:
            statuses = [client.coordinator_status(), *(replica.status for replica in client.replicas())]
    except CliError as error:
        yield Finding("problem", "services", error.message, "a coordinator that answers", error.hint)
        return
    yield from status_findings(statuses)


def status_findings(statuses: Sequence[ReplicaStatus]) -> Iterator[Finding]:
    """Judge the versions and states of services."""
    own = (__version__, PROTOCOL_VERSION)
    for status in statuses:
        theirs = (status.package_version, status.protocol_version)
        if theirs != own:
            yield Finding(
                "problem" if status.protocol_version != PROTOCOL_VERSION else "warning",
                status.replica_id,
                f"relaxd {theirs[0] or 'of unknown version'} with protocol {theirs[1]}; this command is relaxd "
                f"{own[0]} with protocol {own[1]}",
                "one version everywhere: restart the services, and rebuild containers",
                "relaxd down && relaxd up",
            )
        if status.state == REPLICA_STATE_FAILED:
            yield Finding("problem", status.replica_id, status.detail or "it failed", "its log says why", "relaxd logs")
    roles = Counter(status.role for status in statuses)
    counts = ", ".join(f"{role} {count}" if count > 1 else role for role, count in roles.items())
    yield Finding("ok", "services", f"up: {counts}")
