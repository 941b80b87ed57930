"""`relaxd status`: the services, the runs and the queue of each stage."""

from collections.abc import Sequence
from itertools import islice

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxd.cli.scale import ENDED, request_line, scaled_table
from relaxd.client.coordinator import CoordinatorClient, state_name
from relaxd.client.errors import CliError
from relaxd.local.compose import Container
from relaxd.local.state import StackState
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import HealthState
from relaxd.v1.replica_pb2 import ReplicaState

SHOWN_RUNS = 20


def print_status(
    coordinator: CoordinatorClient,
    stack: StackState | None,
    console: Console,
    containers: Sequence[Container] | None = None,
) -> None:
    """Print processes or containers where given, then what the coordinator knows of replicas and runs."""
    if stack is not None:
        console.print(_processes(stack))
    if containers is not None:
        console.print(_containers(containers))
    try:
        replicas, runs = coordinator.replicas(), list(islice(coordinator.runs(), SHOWN_RUNS + 1))
        scaling = [request for request in coordinator.scale_requests() if request.state not in ENDED]
    except CliError:
        if stack is None and containers is None:
            raise
        console.print(f"the coordinator at {coordinator.address} does not answer")
        return
    console.print(_replicas(replicas))
    for request in scaling:
        console.print(request_line(request))
        console.print(scaled_table(request))
    if not runs:
        console.print("no runs yet: relaxd run FILE.toml starts one")
        return
    console.print(_runs(runs[:SHOWN_RUNS]))
    if len(runs) > SHOWN_RUNS:
        console.print(f"the newest {SHOWN_RUNS} runs; older ones are left out")
    newest = coordinator.run(runs[0].run_id)
    if newest.health:
        console.print(_health(newest))
    if newest.queues:
        console.print(_queues(newest))
    if newest.waiting_for:
        console.print(f"run {newest.run_id}: {newest.waiting_for} (relaxd why says more)", markup=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", header_style="dim", box=None)


def _processes(stack: StackState) -> Table:
    table = _table(
        f"processes (supervisor {stack.pid}{', stopping' if stack.stopping else ''})",
        "name",
        "state",
        "pid",
        "restarts",
    )
    for service in stack.services:
        style = {"running": "green", "failed": "bold red", "restarting": "yellow"}.get(service.phase, "")
        phase = Text(service.phase, style)
        table.add_row(service.name, phase, str(service.pid or ""), str(service.restarts))
    return table


def _containers(containers: Sequence[Container]) -> Table:
    table = _table("containers", "name", "state", "status")
    for one in containers:
        style = {"running": "green", "restarting": "yellow", "exited": "bold red"}.get(one.State, "")
        table.add_row(one.Name, Text(one.State, style), one.Status)
    return table


def _replicas(replicas: list[pb.RegisteredReplica]) -> Table:
    gpus = ["GPUs"] if any(replica.leased_gpu_uuids for replica in replicas) else []
    table = _table("replicas", "id", "role", "state", "run", "held", "done", "version", "address", *gpus, "detail")
    for replica in replicas:
        status, registration = replica.status, replica.registration
        table.add_row(
            registration.replica_id,
            registration.role,
            ReplicaState.Name(status.state).removeprefix("REPLICA_STATE_").lower(),
            status.run_id,
            str(status.held_groups),
            str(status.done_groups),
            str(status.weights.version) if status.HasField("weights") else "",
            registration.address,
            *([_gpus(replica)] if gpus else []),
            status.detail,
        )
    return table


def _gpus(replica: pb.RegisteredReplica) -> str:
    """Format a replica's leased GPUs, their memory in use and their utilisation."""
    words = [uuid[:12] for uuid in replica.leased_gpu_uuids]
    gauges = replica.status.gauges
    if "gpu_memory_bytes" in gauges:
        words.append(f"{gauges['gpu_memory_bytes'] / 1e9:.1f} GB")
    if "gpu_utilisation" in gauges:
        words.append(f"{gauges['gpu_utilisation']:.0%}")
    return " ".join(words)


def _runs(runs: list[pb.Run]) -> Table:
    table = _table("runs", "id", "state", "step", "published", "open", "trained", "dropped", "reason")
    for run in runs:
        groups = run.groups
        counts = (groups.published, groups.open, groups.trained, groups.dropped)
        table.add_row(run.run_id, state_name(run.state), f"{run.step}/{run.steps}", *map(str, counts), run.reason)
    return table


def _health(run: pb.Run) -> Table:
    table = _table(f"health of {run.run_id}", "role", "replica", "state", "restarts", "reason")
    styles = {"healthy": "green", "failed": "bold red"}
    for one in run.health:
        state = HealthState.Name(one.state).removeprefix("HEALTH_STATE_").lower()
        replica = one.instance if one.instance in ("", one.replica_id) else f"{one.instance} ({one.replica_id})"
        count = f"{one.restarts} rebuilds" if not one.instance and one.restarts else str(one.restarts or "")
        table.add_row(one.role, replica, Text(state, styles.get(state, "yellow")), count, one.reason)
    return table


def _queues(run: pb.Run) -> Table:
    table = _table(f"queues of {run.run_id}", "stage", "waiting", "held")
    for queue in run.queues:
        table.add_row(queue.stage, str(queue.waiting), str(queue.held))
    return table
