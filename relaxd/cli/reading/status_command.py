"""`relaxd status` and `relaxd why`: the services, the runs, the queue of each stage, and what a run waits for.

Everything that is in order shares one line; everything else gets a separate row.
"""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, RunArgument, StateOption, new_console
from relaxd.cli.reading.run_source import open_run
from relaxd.cli.scale import ENDED, request_line, scaled_table
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED as RUN_ENDED
from relaxd.client.coordinator_client import CoordinatorClient, state_name
from relaxd.local.compose import Container
from relaxd.local.state_folder import StackState
from relaxd.reasons import drop_warnings
from relaxd.rpc.message_parts import words
from relaxd.rpc.stack_identity import STACK_VARIABLE
from relaxd.run_folder import holder_of
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import HEALTH_STATE_HEALTHY, HealthState
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, ReplicaState
from relaxd.waiting import duration

SHOWN_RUNS = 20
SHOWN_REPLICAS = 30


def print_status(
    coordinator: CoordinatorClient,
    stack: StackState | None,
    console: Console,
    containers: Sequence[Container] | None = None,
    run_id: str = "",
) -> None:
    """Print processes or containers where given, then what the coordinator knows of replicas and runs.

    Health and queues are printed for one run, by default the newest.
    """
    if stack is not None:
        _print_processes(stack, console)
    if containers is not None:
        console.print(_containers(containers))
    try:
        replicas, runs = coordinator.replicas(), list(islice(coordinator.runs(), SHOWN_RUNS + 1))
        scaling = [request for request in coordinator.scale_requests() if request.state not in ENDED]
    except CliError as error:
        if stack is None and containers is None:
            raise
        console.print(f"{error.message}; {error.hint}" if error.hint else error.message, soft_wrap=True, markup=False)
        return
    _print_replicas(replicas, console)
    for request in scaling:
        console.print(request_line(request))
        console.print(scaled_table(request))
    if not runs:
        console.print("no runs yet: relaxd run FILE.toml starts one")
        return
    console.print(_runs(runs[:SHOWN_RUNS]))
    if len(runs) > SHOWN_RUNS:
        console.print(f"the newest {SHOWN_RUNS} runs; older ones are left out")
    print_run(coordinator.run(run_id or runs[0].run_id), console)


def print_run(run: pb.Run, console: Console) -> None:
    """Print a run's health, the queues of its stages, and what the run waits for."""
    _print_health(run, console)
    if run.queues:
        queues = ", ".join(f"{queue.stage} {queue.waiting}+{queue.held}" for queue in run.queues)
        console.print(_titled(f"queues of {run.run_id} (waiting+held)", queues))
    if "prompts_tried" in run.metrics and run.state not in RUN_ENDED:
        console.print(_titled(f"curriculum of {run.run_id}", _curriculum(run.metrics)))
    for alarm in run.alarms:
        console.print(f"alarm since step {alarm.first_step}: {alarm.text}", style="yellow", markup=False)
    if run.waiting_for:
        console.print(f"run {run.run_id}: {run.waiting_for} (relaxd why says more)", markup=False)


def _curriculum(metrics: Mapping[str, float]) -> str:
    names = ("prompts_tried", "prompts_solved", "prompts_too_hard", "replayed_groups", "retested_groups")
    words = [f"{metrics[name]:.0f} {name.partition('_')[2].replace('_', ' ')}" for name in names[:3]]
    visits = [f"{metrics[name]:.0f} groups {name.partition('_')[0]}" for name in names[3:]]
    rates = [f"{metrics.get(f'prompts_pass_rate_{bucket}', 0):.0f}" for bucket in range(10)]
    return f"prompts: {', '.join(words)}; {', '.join(visits)}; by pass rate, 0 to 1: {' '.join(rates)}"


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _titled(title: str, text: str) -> Text:
    return Text.assemble((f"{title}:", "bold"), f" {text}")


def _print_processes(stack: StackState, console: Console) -> None:
    well = [one for one in stack.services if one.phase == "running" and not one.restarts]
    title = f"processes (supervisor {stack.pid}{', stopping' if stack.stopping else ''})"
    names = ", ".join(f"{service.name} {service.pid}" for service in well)
    console.print(_titled(title, f"{len(well)} running" + (f": {names}" if well else "")))
    if stack.console:
        console.print(_titled("console", stack.console))
    if unwell := [service for service in stack.services if service not in well]:
        table = _table("", "name", "state", "pid", "restarts")
        for service in unwell:
            style = {"running": "green", "failed": "bold red", "restarting": "yellow"}.get(service.phase, "")
            phase = Text(service.phase, style)
            table.add_row(service.name, phase, str(service.pid or ""), str(service.restarts))
        console.print(table)


def _containers(containers: Sequence[Container]) -> Table:
    table = _table("containers", "name", "state", "status")
    for one in containers:
        style = {"running": "green", "restarting": "yellow", "exited": "bold red"}.get(one.State, "")
        table.add_row(one.Name, Text(one.State, style), one.Status)
    return table


def _print_replicas(replicas: Sequence[pb.RegisteredReplica], console: Console) -> None:
    """Print a row for each replica. If there are very many, print those that aren't ready first and count the
    others."""
    shown, others = list(replicas), []
    if len(replicas) > SHOWN_REPLICAS:
        by_need = sorted(replicas, key=lambda replica: replica.status.state == REPLICA_STATE_READY)
        shown, others = by_need[:SHOWN_REPLICAS], by_need[SHOWN_REPLICAS:]
    # An id begins with its role unless someone chose it.
    roles = any(not one.registration.replica_id.startswith(one.registration.role) for one in shown)
    gpus = any(replica.leased_gpu_uuids for replica in shown)
    columns = ("id", *(["role"] if roles else []), "state", "held", "done", "version", *(["GPUs"] if gpus else []))
    table = _table("replicas", *columns, "detail")
    for replica in shown:
        status, registration = replica.status, replica.registration
        table.add_row(
            registration.replica_id,
            *([registration.role] if roles else []),
            _replica_state(replica),
            str(status.held_groups),
            str(status.done_groups),
            str(status.weights.version) if status.HasField("weights") else "",
            *([_gpus(replica)] if gpus else []),
            status.detail,
        )
    console.print(table)
    if others:
        counts = Counter(f"{replica.registration.role} {_replica_state(replica)}" for replica in others)
        console.print(f"and {len(others)} more: {', '.join(f'{count} {what}' for what, count in counts.items())}")


def _replica_state(replica: pb.RegisteredReplica) -> str:
    return words(ReplicaState).get(replica.status.state, f"unknown ({replica.status.state})") or "unspecified"


def _gpus(replica: pb.RegisteredReplica) -> str:
    """Return a text with a replica's leased GPUs, or its share of a GPU, their utilisation and used memory.

    The memory is that used by all processes.
    """
    share = f"{replica.leased_gpu_share:g} of " if 0 < replica.leased_gpu_share < 1 else ""
    words = [share + uuid[:12] for uuid in replica.leased_gpu_uuids]
    gauges = replica.status.gauges
    if "gpu_memory_bytes" in gauges:
        words.append(f"{gauges['gpu_memory_bytes'] / 1e9:.1f} GB")
    if "gpu_utilisation" in gauges:
        words.append(f"{gauges['gpu_utilisation']:.0%}")
    return " ".join(words)


def _runs(runs: Sequence[pb.Run]) -> Table:
    table = _table("runs", "id", "state", "step", "open", "trained", "dropped", "reason")
    for run in runs:
        groups = run.groups
        counts = (groups.open, groups.trained, groups.dropped)
        table.add_row(run.run_id, state_name(run.state), f"{run.step}/{run.steps}", *map(str, counts), run.reason)
    return table


def _print_health(run: pb.Run, console: Console) -> None:
    if not run.health:
        return
    well = [one for one in run.health if one.state == HEALTH_STATE_HEALTHY and not one.restarts]
    console.print(
        _titled(f"health of {run.run_id}", f"{len(well)} of {len(run.health)} roles and replicas are healthy")
    )
    if len(well) == len(run.health):
        return
    table = _table("", "role", "replica", "state", "restarts", "reason")
    styles = {"healthy": "green", "failed": "bold red"}
    for one in run.health:
        if one in well:
            continue
        state = HealthState.Name(one.state).removeprefix("HEALTH_STATE_").lower()
        replica = one.instance if one.instance in ("", one.replica_id) else f"{one.instance} ({one.replica_id})"
        count = f"{one.restarts} rebuilds" if not one.instance and one.restarts else str(one.restarts or "")
        table.add_row(one.role, replica, Text(state, styles.get(state, "yellow")), count, one.reason)
    console.print(table)


def address_lines(coordinator: str, replicas: Sequence[pb.RegisteredReplica], stack: str = "") -> list[str]:
    """Return lines NAME=host:port for the coordinator, each role's first replica and each replica.

    NAME is the role or the replica's id in capitals, such as ROLLOUT_2 for rollout-2. With `stack`, a line gives
    RELAXD_STACK, the identity that services need to register here.
    """
    found = {"COORDINATOR": coordinator}
    registrations = sorted((replica.registration for replica in replicas), key=lambda one: (one.role, one.replica_id))
    for one in registrations:
        for name in (one.role, one.replica_id):
            found.setdefault(re.sub(r"[^A-Z0-9]", "_", name.upper()), one.address)
    found |= {STACK_VARIABLE: stack} if stack else {}
    return [f"{name}={shlex.quote(address)}" for name, address in found.items()]


def why(
    run_id: RunArgument = "",
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Say what a run waits for, with the numbers, and what to do."""
    with open_run(run_id, folder, state, coordinator) as source:
        run = source.run
        if not source.address and run.state not in RUN_ENDED:
            there = holder_of(Path(run.folder))
            run.waiting_for = f"it belongs to another coordinator (stack {there})" if there else "it waits for services"
            run.waiting_for += f"; it is paused: {run.reason}" if run.reason else ""
        print_why(run, new_console())


def print_why(run: pb.Run, console: Console) -> None:
    """Print what a run waits for, with the evidence for it and the advice."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    name = f"run {run.run_id} ({state_name(run.state)}, step {run.step} of {run.steps})"
    if run.state in RUN_ENDED:
        say(f"{name} waits for nothing: it has ended{f': {run.reason}' if run.reason else ''}")
        return
    say(f"{name}: {run.waiting_for or 'nothing holds it up'}", style="bold")
    if run.wait.on or run.wait.HasField("start_time"):
        since = run.wait.start_time.ToDatetime().astimezone()
        say(f"  since {since:%H:%M:%S}" + (f", because of {run.wait.on}" if run.wait.on else ""))
    if run.HasField("remaining_seconds"):
        say(f"  about {duration(run.remaining_seconds)} are left, once it goes on" if run.waiting_for else
            f"  about {duration(run.remaining_seconds)} are left")  # fmt: skip
    for title, lines in (
        ("what is known", run.wait.evidence),
        ("alarms", [f"since step {alarm.first_step}: {alarm.text}" for alarm in run.alarms]),
        ("dropped groups", drop_warnings(run.groups.dropped_by_reason, run.groups.published)),
        ("what to do", run.wait.advice or (["nothing: it goes on by itself"] if run.wait.kind else [])),
    ):
        if lines:
            say(f"{title}:")
            for line in lines:
                say(f"  {line}")
