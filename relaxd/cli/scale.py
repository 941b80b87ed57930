"""`relaxd scale`: request more or fewer replicas of a role and follow the request."""

from collections import Counter
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.roles import ROLES, SCALABLE_ROLES
from relaxd.v1 import scaling_pb2 as pb
from relaxd.v1.replica_pb2 import REPLICA_STATE_DRAINING

GOOD = (pb.SCALE_STATE_ACTIVE, pb.SCALE_STATE_DONE)
ENDED = (*GOOD, pb.SCALE_STATE_PARTIAL, pb.SCALE_STATE_FAILED, pb.SCALE_STATE_CANCELLED)
STYLES = {
    pb.SCALE_STATE_ACTIVE: "green",
    pb.SCALE_STATE_DONE: "green",
    pb.SCALE_STATE_PARTIAL: "yellow",
    pb.SCALE_STATE_FAILED: "bold red",
    pb.SCALE_STATE_CANCELLED: "yellow",
}


def scale_to(
    coordinator: CoordinatorClient, target: str, *, drain_seconds: float, timeout_seconds: float
) -> pb.ScaleRequest:
    """Request a number of replicas, such as "rollout=3". Raises CliError."""
    role, _, number = target.partition("=")
    if role not in SCALABLE_ROLES or not number.isdigit() or int(number) < 1:
        raise CliError(
            f"{target!r} is not ROLE=COUNT: ROLE is one of {', '.join(SCALABLE_ROLES)}, COUNT at least 1",
            "relaxd scale rollout=3",
        )
    wanted = int(number)
    if (most := ROLES[role].most) and wanted > most:
        raise CliError(f"{target!r} asks for too many: a run has at most {most} {role}", f"relaxd scale {role}={most}")
    current = sum(
        replica.registration.role == role and replica.status.state != REPLICA_STATE_DRAINING
        for replica in coordinator.replicas()
    )
    if wanted < current:
        return coordinator.scale_in(pb.ScaleInRequest(role=role, replicas=wanted, drain_seconds=drain_seconds))
    return coordinator.scale_out(pb.ScaleOutRequest(role=role, replicas=wanted, timeout_seconds=timeout_seconds))


def wait_for(coordinator: CoordinatorClient, request: pb.ScaleRequest, console: Console, *, wait: bool) -> bool:
    """Show a request; with `wait`, until it has ended. Returns False if it failed or ended in part."""
    if not wait or request.state in ENDED:
        console.print(request_line(request))
        return request.state not in ENDED or request.state in GOOD
    wanted = (*GOOD, pb.SCALE_STATE_CANCELLED) if request.cancelled else GOOD
    shown = ""
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        for now in coordinator.watch_scaling(request.request_id):
            if live is not None:
                live.update(_display(now), refresh=True)
            elif (line := str(request_line(now))) != shown:
                console.print(line, soft_wrap=True)
                shown = line
            if now.state in ENDED:
                return now.state in wanted
    return False


def state_name(state: "pb.ScaleState.ValueType") -> str:
    """Return a state's name for display, such as "draining"."""
    return pb.ScaleState.Name(state).removeprefix("SCALE_STATE_").lower()


def request_line(request: pb.ScaleRequest) -> Text:
    """Format a request as one line."""
    way = "out" if request.direction == pb.SCALE_DIRECTION_OUT else "in"
    target = f" to {request.replicas}" if request.replicas else ""
    counts = Counter(replica.state for replica in request.scaled)
    replicas = ", ".join(f"{count} {state_name(state)}" for state, count in counts.items())
    return Text.assemble(
        f"scale request {request.request_id}: {request.role} {way}{target}: ",
        (state_name(request.state), STYLES.get(request.state, "cyan")),
        f" ({replicas})" if replicas else "",
        f" {request.reason}" if request.reason else "",
    )


def scaled_table(request: pb.ScaleRequest) -> Table:
    """List the replicas of a request."""
    table = Table("name", "state", "id", "address", "detail", header_style="dim", box=None)
    for replica in request.scaled:
        state = Text(state_name(replica.state), STYLES.get(replica.state, "cyan"))
        table.add_row(replica.launch_id, state, replica.replica_id, replica.address, replica.detail)
    return table


def _display(request: pb.ScaleRequest) -> Table:
    grid = Table.grid()
    grid.add_row(request_line(request))
    grid.add_row(scaled_table(request))
    return grid
