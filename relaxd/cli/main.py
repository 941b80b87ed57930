"""The `relaxd` command."""

import os
import select
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import typer

from relaxd import __version__
from relaxd.cli import run_checkpoints, run_commands
from relaxd.cli.bundle_command import bundle
from relaxd.cli.demo import demo
from relaxd.cli.execute import execute, find_services, new_run_id
from relaxd.cli.fork_command import fork
from relaxd.cli.options import (
    DEFAULT_STATE,
    PASS_ON,
    ConsoleOption,
    CoordinatorOption,
    KeepUpOption,
    RunIdOption,
    StateOption,
    WordsArgument,
    load_words,
    new_console,
    with_replica_options,
)
from relaxd.cli.output import EscapingConsole, show
from relaxd.cli.preparing.config_command import config_app
from relaxd.cli.preparing.data_command import data
from relaxd.cli.preparing.doctor_command import alerts_app, doctor
from relaxd.cli.preparing.env_command import env_app
from relaxd.cli.preparing.eval_command import evaluate
from relaxd.cli.preparing.first_steps import init, migrate_app, model_app
from relaxd.cli.preparing.fit_command import fit
from relaxd.cli.preparing.reward_command import reward_app
from relaxd.cli.push_command import push
from relaxd.cli.reading import run_tables
from relaxd.cli.reading.ledger_command import ledger
from relaxd.cli.reading.logs_command import logs, trace
from relaxd.cli.reading.status_command import why
from relaxd.cli.rehearse_command import rehearse
from relaxd.cli.scale import autoscale, scale
from relaxd.cli.stack_commands import console, down, status, up
from relaxd.cli.sweep_command import sweep
from relaxd.client import CliError
from relaxd.config.load_toml import ConfigError

HELP = """
relaxd post-trains language models by reinforcement learning, asynchronously, as five gRPC services:
coordinator, rollout, reward, advantage and trainer. (Some runs have more, such as reference, critic or judge.)

\b
Start here:
  relaxd demo                         teach a real model to add, in minutes
  relaxd init my-task                 write a configuration, prompts, a reward
  relaxd doctor                       say what is missing on this machine
  relaxd run my.toml                  train with your own configuration
  relaxd run my.toml --run.steps 50   override any setting
  relaxd sweep sweep.toml             train with several settings, and compare

\b
Before a run:
  relaxd config show my.toml          print every setting with its value
  relaxd data my.toml                 show prompts as the model gets them
  relaxd reward test my.toml          try the reward on three prompts
  relaxd env test calculator          hold a conversation with an environment
  relaxd alerts test my.toml          test who is told of alarms
  relaxd fit my.toml                  say what GPUs hold, which layouts fit
  relaxd rehearse my.toml             run it at its real size without GPUs
  relaxd eval my.toml --model FOLDER  evaluate a model

\b
During a run, and most of it afterwards:
  relaxd watch                        follow it (also: samples, metrics, logs)
  relaxd console                      show it in a browser, until services end
  relaxd why                          say what it waits for, and what to do
  relaxd runs                         list the runs with their results
  relaxd report RUN                   show where time went; curves, as a page
  relaxd evaluation RUN               show results on evaluation sets
  relaxd ledger RUN                   show what became of every prompt
  relaxd pause                        pause it (also: stop, checkpoint)

\b
Keep the services up for several runs:
  relaxd up --rollout 2               start Redis and the services
  relaxd status                       show the services, the runs, the queues
  relaxd scale rollout=3              add or remove replicas
  relaxd autoscale on                 let the coordinator add and remove
  relaxd down                         stop the services

\b
Recover and inspect:
  relaxd resume RUN                   continue it after a crash
  relaxd checkpoints RUN              list checkpoints (also: export, push)
  relaxd replay RUN --step N          repeat a step and compare
  relaxd fork RUN --step N --set algorithm.name=gspo
                                      train recorded steps with other settings
  relaxd bundle RUN --step N          pack a step for others, without secrets
"""

app = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
app.add_typer(config_app, name="config")
app.add_typer(migrate_app, name="migrate")
app.add_typer(model_app, name="model")
app.add_typer(reward_app, name="reward")
app.add_typer(env_app, name="env")
app.add_typer(alerts_app, name="alerts")


def _version(asked: bool) -> None:
    if asked:
        show(f"relaxd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    token_file: Annotated[str, typer.Option(help="File with the bearer token for calls. [RELAXD_TOKEN_FILE]")] = "",
    tls_ca: Annotated[
        str, typer.Option(help="File with the CA that signed the services' certificates. [RELAXD_TLS_CA]")
    ] = "",
    tls_certificate: Annotated[
        str, typer.Option(help="File with the client certificate. [RELAXD_TLS_CERTIFICATE]")
    ] = "",
    tls_key: Annotated[str, typer.Option(help="File with the client certificate's key. [RELAXD_TLS_KEY]")] = "",
    tls_name: Annotated[
        str,
        typer.Option(
            help="Host name in the services' certificates, if it isn't that of the address. [RELAXD_TLS_NAME]"
        ),
    ] = "",
) -> None:
    # Channels of this process and of the services that it starts read these from the environment.
    given = {"TOKEN_FILE": token_file, "TLS_CA": tls_ca, "TLS_CERTIFICATE": tls_certificate}
    given |= {"TLS_KEY": tls_key, "TLS_NAME": tls_name}
    os.environ.update({f"RELAXD_{name}": value for name, value in given.items() if value})
    if token_file:
        os.environ.pop("RELAXD_TOKEN", None)  # the option takes precedence


def _add(*commands: Callable[..., None], **settings: Any) -> None:
    """Register functions as commands of `relaxd`. The help lists commands in the order of registration."""
    for command in commands:
        app.command(**settings)(command)


_add(demo, init)
_add(data, fit, rehearse, doctor, context_settings=PASS_ON)


@app.command(context_settings=PASS_ON)
@with_replica_options
def run(
    replicas: Mapping[str, int],
    words: WordsArgument,
    run_id: RunIdOption = "",
    keep_up: KeepUpOption = False,
    console: ConsoleOption = True,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Train with a configuration, on the services that are up or else on services started for this run."""
    path, config = load_words(words)
    where = replace(find_services(replicas, state, coordinator), keep_up=keep_up, console=console)
    execute(config, run_id or new_run_id(path.stem), where, new_console())


_add(up, down, status)
_add(run_tables.watch, console, why)
_add(run_commands.pause, run_commands.resume, run_commands.checkpoint, run_commands.stop, run_commands.delete)
_add(scale, autoscale)
_add(run_tables.samples, run_tables.metrics, run_tables.runs, logs, trace)
_add(run_tables.report, run_tables.evaluation, ledger)
_add(evaluate, name="eval", context_settings=PASS_ON)
_add(run_checkpoints.checkpoints, run_checkpoints.replay, run_checkpoints.export, fork, bundle, push, sweep)


READING = ("watch", "why", "samples", "metrics", "runs", "logs", "trace", "report", "evaluation", "ledger", "status")
"""Names of the commands that exit with 0 if the reader of their output stops early, as in `relaxd ledger | head`."""

STDOUT = 1
"""File descriptor of standard output."""


def _reader_is_gone() -> bool:
    """Return True if standard output is a pipe without a reader. Further output is then discarded."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    poll = select.poll()
    poll.register(STDOUT, 0)  # errors are told without asking
    is_gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return is_gone


def main() -> None:
    """Run the command. Errors print one line and exit with 1; RELAXD_DEBUG=1 shows the traceback."""
    debug = os.environ.get("RELAXD_DEBUG") == "1"
    errors = EscapingConsole(stderr=True, highlight=False)
    try:
        app()
    except SystemExit:
        if sys.argv[1:2] and sys.argv[1] in READING and _reader_is_gone():
            sys.exit(0)
        raise
    except (CliError, ConfigError) as error:
        if debug:
            raise
        errors.print("error: ", style="bold red", end="")
        errors.print(str(error), markup=False, soft_wrap=True)
        if isinstance(error, CliError) and error.hint:
            errors.print(f"  try: {error.hint}", markup=False, soft_wrap=True)
        sys.exit(1)
    except Exception as error:  # anything that gets here is a bug
        if debug:
            raise
        errors.print(f"error: {type(error).__name__}: {error}", markup=False, soft_wrap=True)
        errors.print("  this is a bug in relaxd; RELAXD_DEBUG=1 shows where", soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
