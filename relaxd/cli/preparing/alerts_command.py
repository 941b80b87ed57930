"""`relaxd alerts test`."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from relaxd.alerts.notifications import VARIABLE, AlertUrl, Message, Sender, UrlProblem, read_urls
from relaxd.cli.options import PASS_ON, load_words
from relaxd.cli.output import show
from relaxd.client import CliError

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
    """Send the test message. Returns the problem; "" if there is none."""
    try:
        return Sender(url).send(MESSAGE)
    except UrlProblem as error:
        return str(error)
