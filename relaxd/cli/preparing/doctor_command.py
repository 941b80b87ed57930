"""`relaxd doctor`, the machine checks that other commands run before they start anything, and `relaxd alerts test`."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from relaxd.alerts.notifications import VARIABLE, AlertUrl, Message, Sender, UrlProblem, read_urls
from relaxd.cli.options import DEFAULT_STATE, PASS_ON, CoordinatorOption, StateOption, load_words, new_console
from relaxd.cli.output import show, show_json
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.local import compose
from relaxd.local.stack import address_here
from relaxd.local.state_folder import StateFolder
from relaxd.tools.doctor import Finding, Level, Scope
from relaxd.tools.doctor.checks import Moment, examine

STYLES: dict[Level, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "problem": "bold red"}
PREFLIGHT_SECONDS = 0.3
"""Maximum time to wait for another process's answer in the checks before services start, in seconds."""


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE.toml [--section.key VALUE]...]",
            help="Configuration of a run that is meant, and settings that override it.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per finding and line.")] = False,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Check this machine and what runs on it: packages, GPUs, limits, disk, ports, Redis, services, sandbox, Docker.

    Exits with 1 if there are problems.
    """
    config = load_words(words)[1] if words else None
    console, levels = new_console(), Counter[Level]()
    for finding in examine(scope_of(state, config, coordinator)):
        levels[finding.level] += 1
        if as_json:
            show_json(asdict(finding))
        else:
            print_finding(finding, console)
    if not as_json:
        counts = [
            f"{levels[level]} {level}s" if levels[level] != 1 else f"1 {level}" for level in ("problem", "warning")
        ]
        console.print(", ".join(counts) if levels["problem"] or levels["warning"] else "nothing is wrong")
    if levels["problem"]:
        raise typer.Exit(1)


def scope_of(
    state: Path,
    config: RunConfig | None,
    coordinator: str | None,
    patience_seconds: float = 2.0,
    *,
    containers: bool = False,
) -> Scope:
    """Return the scope of the doctor's checks of this machine.

    `containers`: True if the command will start containers.
    """
    folder = StateFolder(state)
    containers = containers or compose.read(folder) is not None
    return Scope(
        folder=folder,
        config=config,
        coordinator=address_here(state, coordinator),
        containers=containers,
        elsewhere=bool(coordinator) or containers,
        patience_seconds=patience_seconds,
    )


def warn_of_machine(moment: Moment, state: Path, config: RunConfig | None, console: Console) -> None:
    """Print this machine's warnings and problems for a command that is about to start services."""
    scope = scope_of(state, config, None, PREFLIGHT_SECONDS, containers=moment == "compose")
    for finding in examine(scope, moment):
        print_finding(finding, console)


def print_finding(finding: Finding, console: Console) -> None:
    """Print a finding of a machine check, with the right state and the command that repairs it."""
    console.print(
        Text.assemble((f"{finding.level:<8}", STYLES[finding.level]), f"{finding.about}: {finding.found}"),
        soft_wrap=True,
    )
    if finding.right:
        console.print(f"        right: {finding.right}", soft_wrap=True)
    if finding.how:
        console.print(f"        try: {finding.how}", soft_wrap=True)


alerts_app = typer.Typer(help="Try notifications.", no_args_is_help=True)
MESSAGE = Message("relaxd: test", "a test message of relaxd alerts test", "info")
MAX_AT_ONCE = 16


@alerts_app.command("test", context_settings=PASS_ON)
def alerts_test(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE.toml] [--section.key VALUE]...",
            help="Configuration whose alerts.urls_file counts; default: the addresses in RELAXD_ALERT_URLS.",
        ),
    ] = None,
) -> None:
    """Send a test message to each address, and say which took it."""
    file = load_words(words)[1].alerts.urls_file if words else ""
    try:
        urls = read_urls(file, os.environ)
    except UrlProblem as error:
        raise CliError(str(error)) from error
    if not urls:
        raise CliError(
            f"there is no address to notify: neither {VARIABLE} nor alerts.urls_file has one",
            f"{VARIABLE}='json://HOST/PATH' relaxd alerts test (docs/alerts.md)",
        )
    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        problems = list(threads.map(_try, urls))
    for url, problem in zip(urls, problems, strict=True):
        reports = f", with a report every {url.every} steps" if url.every else ""
        show(f"{url.shown}: {problem or f'took the test message{reports}'}")
    if any(problems):
        raise typer.Exit(1)


def _try(url: AlertUrl) -> str:
    """Send the test message to an address. Returns the problem; "" if the address accepted the message."""
    try:
        return Sender(url).send(MESSAGE)
    except UrlProblem as error:
        return str(error)
