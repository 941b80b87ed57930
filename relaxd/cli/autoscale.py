"""`relaxd autoscale`: show what the autoscaler sees and has decided, or switch it."""

import time
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
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.local.silence import open_client
from relaxd.local.stack import coordinator_address
from relaxd.rpc.message_parts import numbers, words
from relaxd.v1 import scaling_pb2 as pb

SHOWN_DECISIONS = 10
FOLLOW_SECONDS = 1.0
"""Interval between two views, in seconds: that of the autoscaler's own looks."""


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
    """Show the autoscaler until its run ends: in place on a terminal, elsewhere whenever it says something else.

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
                if client.run(now.run_id).state not in ENDED:
                    raise
                return


def autoscaler_view(autoscaler: pb.Autoscaler) -> Group:
    """Format the state of an autoscaler: a sentence, its conditions and its last decisions."""
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
