"""Checks of ports."""

from collections.abc import Iterator

from relaxd.config.operation import FEWEST_PORTS
from relaxd.local.port_holder import find_holder
from relaxd.process.ports import is_free
from relaxd.tools.doctor.finding import Finding, Scope


def check_coordinator_port(scope: Scope) -> Iterator[Finding]:
    """Check who holds the coordinator's default port."""
    about, stack = f"port {scope.port}", scope.folder.read()
    holder = find_holder(scope.port, seconds=scope.patience_seconds)
    if holder is None:
        yield Finding("ok", about, "free")
    elif stack is not None and stack.stack == holder.stack:
        yield Finding("ok", about, f"held by the services that are up here: {holder}")
    elif scope.coordinator and scope.coordinator.endswith(f":{scope.port}"):
        yield Finding("ok", about, f"held by the coordinator that commands call here: {holder}")
    else:
        yield Finding(
            "warning",
            about,
            f"held by {holder}",
            "free for `relaxd up`, which else needs --port; `relaxd run` takes any free port"
            + "; `relaxd down` ends what runs there" * bool(holder.folder),
            f"relaxd down --state {holder.folder}" if holder.folder else "relaxd up --port 0",
        )


def check_weight_ports(scope: Scope) -> Iterator[Finding]:
    """Check that weights.ports, if set, has free ports."""
    ports = scope.config.weights.port_range if scope.config else None
    if ports is None or scope.elsewhere:
        return
    free = sum(is_free(port, "0.0.0.0") for port in ports)
    found = f"{free} of {len(ports)} are free"
    if free >= FEWEST_PORTS:
        yield Finding("ok", "weights.ports", found)
    else:
        yield Finding("problem", "weights.ports", found, f"at least {FEWEST_PORTS}: give a larger range")
