"""`relaxd scale` and `relaxd autoscale`: requests for more or fewer replicas of a role, and the autoscaler's state."""

import time
from collections import Counter
from contextlib import nullcontext
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, StateOption, new_console
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED as RUN_ENDED
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.stack import coordinator_address, open_client
from relaxd.roles import ROLES, SCALABLE_ROLES
from relaxd.rpc.message_parts import numbers, words
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


def scale(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[ROLE=COUNT|ROLE]",
            help="Role and target number of replicas, such as rollout=3. A role, or nothing: list its requests.",
            show_default=False,
        ),
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the request has ended; Ctrl-C only stops waiting.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the requests in progress (of ROLE).")] = False,
    drain_seconds: Annotated[float, typer.Option(min=0, help="When removing: seconds to finish held groups.")] = 30.0,
    timeout_seconds: Annotated[
        float, typer.Option(min=1, help="When adding: seconds until the new replicas must be active.")
    ] = 600.0,
    rollback_all: Annotated[
        bool, typer.Option("--rollback-all", help="When adding: remove all new replicas if one fails.")
    ] = False,
    sglang_url: Annotated[
        list[str] | None,
        typer.Option(help="Add a rollout replica for the SGLang server at http://host:port; may be repeated."),
    ] = None,
    states: Annotated[
        list[str] | None,
        typer.Option("--request-state", help="List requests in this state, such as failed; may be repeated."),
    ] = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Add or remove replicas of a role, even during a run; or list or cancel the requests."""
    changes = "=" in target or bool(sglang_url)
    if changes and (cancel or states):
        option = "--cancel" if cancel else "--request-state"
        raise CliError(f"{option} takes a role, or nothing, and no number and URL", f"relaxd scale rollout {option}")
    if sglang_url and target:
        raise CliError("--sglang-url takes no ROLE=COUNT: each URL is a replica", "relaxd scale --sglang-url URL")
    chosen = _filter(target, states or []) if not changes else pb.ScaleFilter()
    console = new_console()
    with open_client(coordinator_address(state, coordinator), state) as client:
        if cancel:
            cancelling = pb.CancelScaleRequestsRequest(filter=chosen, dry_run=dry_run)
            requests = client.cancel_scaling(cancelling)
            if not requests:
                raise CliError("no scale request is in progress that could be rolled back", "relaxd scale")
        elif changes:
            more = pb.ScaleOutRequest(
                timeout_seconds=timeout_seconds, rollback_all=rollback_all, sglang_urls=sglang_url, dry_run=dry_run
            )
            less = pb.ScaleInRequest(drain_seconds=drain_seconds, dry_run=dry_run)
            requests = [client.scale_out(more) if sglang_url else scale_to(client, target, more, less)]
        else:
            for request in client.scale_requests(chosen=chosen):
                console.print(request_line(request), soft_wrap=True)
            return
        if dry_run:
            console.print("dry run, nothing is done:")
            for request in requests:
                console.print(_display(request))
            return
        try:
            good = [wait_for(client, request, console, wait=wait) for request in requests]
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    if not all(good):
        raise typer.Exit(1)


def _filter(role: str, states: list[str]) -> pb.ScaleFilter:
    """Return a filter that selects the scale requests of a role in these states. Raises CliError."""
    if role and role not in SCALABLE_ROLES:
        raise CliError(
            f"{role!r} is not ROLE=COUNT or ROLE: ROLE is one of {', '.join(SCALABLE_ROLES)}, COUNT at least 1",
            "relaxd scale rollout=3",
        )
    known = numbers(pb.ScaleState)
    for name in states:
        if not known.get(name):
            names = ", ".join(filter(None, known))
            raise CliError(f"{name!r} is no state of a request: {names}", "relaxd scale --request-state failed")
    return pb.ScaleFilter(role=role, states=[known[name] for name in states])


def scale_to(
    coordinator: CoordinatorClient, target: str, more: pb.ScaleOutRequest, less: pb.ScaleInRequest
) -> pb.ScaleRequest:
    """Send a request to scale a role to a target such as "rollout=3". Raises CliError.

    Completes and sends `less` if the target is below the current number of replicas, else `more`.
    """
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
    chosen = less if wanted < current else more
    chosen.role, chosen.replicas = role, wanted
    return coordinator.scale_in(less) if wanted < current else coordinator.scale_out(more)


def wait_for(coordinator: CoordinatorClient, request: pb.ScaleRequest, console: Console, *, wait: bool) -> bool:
    """Show a scale request; with `wait`, until it has ended. Returns False if it failed or was met only in part."""
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


def request_line(request: pb.ScaleRequest) -> Text:
    """Return a line that describes a scale request."""
    way = "out" if request.direction == pb.SCALE_DIRECTION_OUT else "in"
    target = f" to {request.replicas}" if request.replicas else ""
    counts = Counter(replica.state for replica in request.scaled)
    replicas = ", ".join(f"{count} {words(pb.ScaleState)[state]}" for state, count in counts.items())
    return Text.assemble(
        f"scale request {request.request_id}: {request.role} {way}{target}: ",
        (words(pb.ScaleState)[request.state], STYLES.get(request.state, "cyan")),
        f" ({replicas})" if replicas else "",
        f" {request.reason}" if request.reason else "",
    )


def scaled_table(request: pb.ScaleRequest) -> Table:
    """Return a table of the replicas that a scale request starts or removes."""
    table = Table("name", "state", "id", "address", "detail", header_style="dim", box=None)
    for replica in request.scaled:
        state = Text(words(pb.ScaleState)[replica.state], STYLES.get(replica.state, "cyan"))
        table.add_row(replica.launch_id, state, replica.replica_id, replica.address, replica.detail)
    return table


def _display(request: pb.ScaleRequest) -> Table:
    grid = Table.grid()
    grid.add_row(request_line(request))
    grid.add_row(scaled_table(request))
    return grid


SHOWN_DECISIONS = 10
FOLLOW_SECONDS = 1.0
"""Interval between two looks at the autoscaler, in seconds; that between two checks of the autoscaler."""


def autoscale(
    mode: Annotated[
        str,
        typer.Argument(metavar="[on|dry_run|off]", help="New mode for the rest of the run.", show_default=False),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Show it anew each second until the run ends.")] = False,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show what the autoscaler sees and has decided, or switch it."""
    modes = numbers(pb.AutoscaleMode)
    if mode and mode not in modes:
        raise CliError(f"{mode!r} is no mode of the autoscaler: on, dry_run or off", "relaxd autoscale dry_run")
    with open_client(coordinator_address(state, coordinator), state) as client:
        now = client.set_autoscaler(modes[mode]) if mode else client.autoscaler()
        if follow:
            follow_autoscaler(client, now, new_console())
        else:
            new_console().print(autoscaler_view(now))


def follow_autoscaler(client: CoordinatorClient, now: pb.Autoscaler, console: Console) -> None:
    """Show the autoscaler until its run ends: in place on a terminal, elsewhere whenever its state changes.

    Raises CliError: the coordinator doesn't answer.
    """
    shown = None
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            if live is not None:
                live.update(autoscaler_view(now), refresh=True)
            elif (said := (now.mode, now.replicas, now.reason)) != shown:
                console.print(autoscaler_view(now))
                shown = said
            time.sleep(FOLLOW_SECONDS)  # idle: shows it again
            try:
                now = client.autoscaler(now.run_id)
            except CliError:
                if client.run(now.run_id).state not in RUN_ENDED:
                    raise
                return


def autoscaler_view(autoscaler: pb.Autoscaler) -> Group:
    """Return a view of an autoscaler's state: a sentence, the conditions for scaling, and the last decisions."""
    change = "" if autoscaler.wanted_replicas == autoscaler.replicas else f", {autoscaler.wanted_replicas} are wanted"
    parts: list[Text | Table] = [
        Text(
            f"run {autoscaler.run_id}: the autoscaler is {words(pb.AutoscaleMode).get(autoscaler.mode, 'unknown')} "
            f"({autoscaler.min_replicas} to {autoscaler.max_replicas} rollout replicas); "
            f"there are {autoscaler.replicas}{change}: {autoscaler.reason}"
        )
    ]
    if autoscaler.conditions:
        table = Table("to", "condition", "is", "wanted", "", header_style="dim", box=None)
        for one in autoscaler.conditions:
            way = "add" if one.direction == pb.SCALE_DIRECTION_OUT else "remove"
            wanted = f"{'above' if one.above else 'below'} {one.threshold:g}"
            holds = Text("yes", "green") if one.holds else Text("no", "dim")
            table.add_row(way, one.name, f"{one.value:.2f}", wanted, holds)
        parts.append(table)
    if autoscaler.decisions:
        table = Table("at", "replicas", "request", "because", header_style="dim", box=None)
        for decision in autoscaler.decisions[:SHOWN_DECISIONS]:
            at = datetime.fromtimestamp(decision.decide_time.ToNanoseconds() / 1e9)
            request = decision.request_id or "none"
            table.add_row(
                f"{at:%H:%M:%S}", f"{decision.replicas} to {decision.wanted_replicas}", request, decision.reason
            )
        parts.append(table)
    return Group(*parts)
