"""Execution of one run, from its id and folder to its report, on running services or on services started for it."""

import json
import math
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxd.board import roles_for
from relaxd.board.sides.side_base import RESERVED_RUN_ID, RUN_ID, RUN_ID_RULE
from relaxd.cli.options import console_wanted, data_errors
from relaxd.cli.output import sayer
from relaxd.cli.preparing.config_command import check, check_algorithm
from relaxd.cli.preparing.doctor_command import warn_of_machine
from relaxd.cli.preparing.first_steps import prepare_model
from relaxd.cli.reading.follow import Terminated, follow, interrupt_code
from relaxd.cli.reading.run_source import began_on_up, failed_by_data, refuse_ended, resume_command
from relaxd.cli.run_checkpoints import save_last_checkpoint
from relaxd.client import CliError, RunFailedError
from relaxd.client.coordinator_client import AWAY_SECONDS, ENDED, CoordinatorClient
from relaxd.client.folder_runs import read_run
from relaxd.config import PlacementConfig, RunConfig
from relaxd.config.load_toml import ConfigError, load_recorded
from relaxd.config.write_toml import dump
from relaxd.data.prompt_files import is_hub_path
from relaxd.data.templating import with_template_texts
from relaxd.evaluation.estimates import shown_name
from relaxd.local import compose, stack
from relaxd.local.placement import machine_problems, placed_replicas
from relaxd.local.stack import open_client, why_silent
from relaxd.local.state_folder import StackState, StateFolder
from relaxd.process.ports import LOOPBACK
from relaxd.reasons import drop_warnings
from relaxd.replica.gpus import visible_gpus
from relaxd.report.report_files import write_report
from relaxd.report.run_result import SetRow, read_result, results
from relaxd.roles import ROLES, ROLLOUT
from relaxd.run_folder import HELD_OUT, LOGS, RECORD, SUMMARY, use_of
from relaxd.v1.coordinator_pb2 import RUN_STATE_PAUSED, Run


def new_run_id(prefix: str) -> str:
    """Return a new run id: a prefix such as the configuration's name, the time, and a random end.

    The random end distinguishes runs that begin in the same second.
    """
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix).strip("-")[:32] or "run"
    return f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_run_id(run_id: str) -> None:
    """Raise CliError if a text isn't allowed as the id of a run."""
    if RUN_ID.fullmatch(run_id) is None or run_id == RESERVED_RUN_ID:
        raise CliError(f"--run-id {run_id!r} {RUN_ID_RULE}, and not {RESERVED_RUN_ID!r}")


def free_folder(runs: Path, run_id: str) -> Path:
    """Return the absolute path of a new run's folder. Raises CliError if the folder is in use or not writable."""
    folder = runs.expanduser().resolve() / run_id
    if use := use_of(folder):
        more = "continues" if unfinished(folder) else "--run.steps N extends"
        raise CliError(use, f"relaxd resume {run_id} {more} it, --run-id ID names another one")
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise CliError(f"run.folder = {str(runs)!r}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CliError(f"run.folder = {str(runs)!r}: {existing} can't be written by this user")
    return folder


SHOWN_STEPS = 5
"""Number of steps at each end of a run, at most, over which the final table averages the reward."""
Begin = Callable[[CoordinatorClient], Run]
"""Type of functions that start or continue a run at a coordinator, and return the run."""
MAX_PAUSE_SECONDS = 600.0
"""Maximum pause of an unattended run, in seconds, after which its services stop. The run can be resumed later."""


@dataclass(frozen=True)
class Where:
    """Which services a run uses: those that are up, or new ones, with options for starting them."""

    folder: StateFolder
    """Folder with the state of the services that are started for the run."""
    address: str | None = None
    """Address of the coordinator of services that are up; None: services are started for this run."""
    in_container: bool = False
    """True if the coordinator runs in a container: its address is local, but its paths differ."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Number of replicas to start, by role; overrides the run's placement."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """Engine name by role, for roles whose engine can be chosen."""
    keep_up: bool = False
    """True to keep the started services up after the run."""
    shared_redis: bool = False
    """True to start Redis on the data of `relaxd up`, which several runs share."""
    console: bool = field(default_factory=console_wanted)
    """True to serve a console beside the started services."""


def find_services(replicas: Mapping[str, int], state: Path, coordinator: str | None) -> Where:
    """Return the services of the coordinator at this address, else services that are up, else services to start.

    Raises CliError.
    """
    folder = StateFolder(state)
    found: StackState | compose.ComposeState | None = None
    if coordinator is None:
        found = stack.use_stack(folder.read()) or compose.use(folder)
    return Where(
        folder,
        address=coordinator or (found.coordinator if found else None),
        in_container=isinstance(found, compose.ComposeState),
        replicas=replicas,
    )


def execute(config: RunConfig, run_id: str, where: Where, console: Console) -> Path:
    """Run `config` to its end and write the report. Returns the run's folder. Raises CliError, ConfigError."""
    say = sayer(console)
    check_run_id(run_id)
    if where.address is not None and config.placement != PlacementConfig():
        say("[placement] is for services that are started: those that are up stay as they are (relaxd scale)")
    if where.address is not None and (where.in_container or not where.address.startswith((LOOPBACK, "localhost"))):
        # Paths, the run's folder included, are those of the coordinator's machine.
        with data_errors():
            config = with_template_texts(config, absolute=False)
        with open_client(where.address, where.folder.path) as coordinator:
            return _train(coordinator, _starting(config, run_id), where, console)
    run_folder = free_folder(config.run.folder, run_id)
    if problems := check_algorithm(config):
        raise ConfigError(problems)
    prepare_model(config, say)
    say("checking the settings, the data and the reward")
    problems = check(config, call_reward=where.address is None, first_look=True)
    if where.address is None:
        problems += machine_problems(config, where.replicas, len(visible_gpus()))
    if problems:
        raise ConfigError(problems)
    replicas = _replicas(where, config)
    config = _with_shared_cores(with_absolute_paths(config), replicas)
    if where.address is not None:
        with open_client(where.address, where.folder.path) as coordinator:
            return _train(coordinator, _starting(config, run_id), where, console)
    where = replace(where, replicas=replicas, engines=_engines(config))
    warn_of_machine("run", where.folder.path, config, console)
    return _on_own_services(_starting(config, run_id), run_id, run_folder, where, console)


def execute_again(
    run_folder: Path,
    where: Where,
    console: Console,
    steps: int = 0,
    *,
    new_data: bool = False,
    before: Callable[[], None] | None = None,
) -> Path:
    """Start services for a run whose services are gone, and follow the run to its end. Returns its folder.

    Redis starts on its last data: the data of the run, or of `relaxd up` if the run began there, so that no older copy
    of the run remains. The run is restored from its folder if Redis doesn't know it, if `steps` gives a new number of
    steps, or if the run failed because of its data. `new_data` accepts changed prompts. `before` may change the folder:
    it is called before the restore, after Redis's data of the run is removed. Raises CliError, before anything starts,
    if the run has ended for another reason and gets no more steps.
    """
    where = replace(where, shared_redis=began_on_up(run_folder))
    if before is not None:
        with where.folder.starting("relaxd resume"):  # nobody uses what is removed
            shutil.rmtree(_redis_data(where, read_run(run_folder).run_id), ignore_errors=True)
            before()
    run = read_run(run_folder)
    run_id = run.run_id
    refuse_ended(run, steps)

    def begin(coordinator: CoordinatorClient) -> Run:
        known = {run.run_id: run for run in coordinator.runs()}
        if steps and run_id in known and known[run_id].state not in ENDED:
            raise CliError(
                f"run {run_id} has not ended in the Redis of `relaxd up`: it keeps its {run.steps} steps",
                f"relaxd resume {run_id} continues it; once it has ended, --run.steps extends it",
            )
        if steps:
            sayer(console)(f"run {run_id} goes on from {run_folder}, to step {steps}")
            return coordinator.restore_run(run_folder, steps, new_data=new_data)
        if run_id not in known or failed_by_data(known[run_id]):
            sayer(console)(f"run {run_id} is restored from {run_folder}")
            return coordinator.restore_run(run_folder, new_data=new_data)
        if known[run_id].state in ENDED:
            raise CliError(f"run {run_id} has ended ({known[run_id].reason})", "relaxd run starts a new one")
        return coordinator.resume_run(run_id) if known[run_id].state == RUN_STATE_PAUSED else known[run_id]

    config = load_recorded(run.config_json, run_id)
    where = replace(where, replicas=_replicas(where, config), engines=_engines(config))
    warn_of_machine("run", where.folder.path, config, console)
    if steps and not where.shared_redis:
        shutil.rmtree(_redis_data(where, run_id), ignore_errors=True)
    return _on_own_services(begin, run_id, run_folder, where, console)


def _starting(config: RunConfig, run_id: str) -> Begin:
    return lambda coordinator: coordinator.start_run(dump(config), run_id)


def _on_own_services(begin: Begin, run_id: str, run_folder: Path, where: Where, console: Console) -> Path:
    """Start services, follow the run and stop them. Redis's own data is removed only once the run has ended.

    Raises CliError before it touches anything if the state folder has services, or another command starts some there.
    """
    with where.folder.starting(f"relaxd run --run-id {run_id}"):
        say = sayer(console)
        folder = where.folder
        shared = where.keep_up or where.shared_redis
        redis_data = _redis_data(where, run_id)
        plan = stack.make_plan(
            folder,
            port=None,
            replicas=where.replicas,
            redis_data=redis_data,
            stop_with_parent=not where.keep_up,
            engines=where.engines,
            console=where.console,
        )
        stay = False
        try:
            say("starting Redis and the services")
            state = stack.up(folder, plan, say, None if shared else run_folder / LOGS)
            say(f"up: {', '.join(f'{service.name} ({service.pid})' for service in state.services)}")
            if plan.console:
                say(f"the console is at {plan.console}")
            with CoordinatorClient(plan.coordinator, plan.stack, why_silent(folder.path)) as coordinator:
                found = _train(coordinator, begin, where, console)
            stay = where.keep_up
            return found
        except KeyboardInterrupt:  # before the run began
            raise typer.Exit(130) from None
        finally:
            if stay:
                say(f"the services stay up at {plan.coordinator}; relaxd down stops them")
            else:
                if folder.is_up():
                    say("stopping the services")
                stack.down(folder, say)
                if unfinished(run_folder):
                    command = "relaxd up" if shared else resume_command(run_id, run_folder, where.folder.path)
                    say(f"run {run_id} has not ended: {command} continues it")
                elif not shared:
                    shutil.rmtree(redis_data, ignore_errors=True)


def unfinished(run_folder: Path) -> bool:
    """Return True if a run in this folder has begun but not ended: it needs its Redis data to continue."""
    try:
        record = json.loads((run_folder / RECORD).read_text())
        return record["phase"] not in ("STOPPED", "FAILED") or not (run_folder / SUMMARY).exists()
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError):
        return True  # unreadable: keep its data


def _redis_data(where: Where, run_id: str) -> Path:
    """Return the folder of Redis's data: a separate one for a single run, the shared one if services stay up."""
    return where.folder.redis_data if where.keep_up or where.shared_redis else where.folder.redis_data_of(run_id)


def _train(coordinator: CoordinatorClient, begin: Begin, where: Where, console: Console) -> Path:
    ours = where.address is None

    def ours_are_healthy() -> None:
        if not where.folder.is_up():
            raise stack.failure(where.folder, "supervisor", "the supervisor of the services is gone")
        # The coordinator restarts the other services, or fails the run.
        stack.raise_if_failed(where.folder, where.folder.read(), roles=("redis", "coordinator"))

    run = begin(coordinator)
    healthy = ours_are_healthy if ours else stack.raise_when_down(where.folder, coordinator.address, run.run_id)
    try:
        view = follow(
            coordinator,
            run.run_id,
            console,
            healthy=healthy,
            # Someone at a terminal sees the pause and may want to use the services meanwhile.
            max_pause=MAX_PAUSE_SECONDS if ours and not console.is_terminal else float("inf"),
            # The supervisor restarts our coordinator, or `healthy` raises.
            away_seconds=float("inf") if ours else AWAY_SECONDS,
            old_drops=False,
        )
    except KeyboardInterrupt as interrupt:
        if ours:
            console.print(f"\nstopping the services of run {run.run_id}")
            save_last_checkpoint(coordinator, run.run_id, sayer(console))
        elif not isinstance(interrupt, Terminated):  # which ends this command, as a lost connection would
            console.print(f"\nstopping run {run.run_id}")
            coordinator.stop_run(run.run_id, "stopped from the command line")
        raise typer.Exit(interrupt_code(interrupt)) from None
    except CliError as error:
        raise _with_log(error, where) if ours else error from None
    run_folder = Path(view.run.folder)
    if not run_folder.is_dir():
        console.print(f"the run's files are on the coordinator's machine, in {run_folder}")
        return run_folder
    if ours and where.keep_up:  # else they are there
        shutil.copytree(where.folder.logs, run_folder / LOGS, dirs_exist_ok=True)
    write_report(run_folder)
    console.print(result_table(run_folder))
    dropped = drop_warnings(view.run.groups.dropped_by_reason, view.run.groups.published)
    for warning in [*read_result(run_folder).alarms, *dropped]:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for line in result_paths(run_folder):
        console.print(line, soft_wrap=True)
    return run_folder


def _with_log(error: CliError, where: Where) -> CliError:
    """Return the error with the last log lines of the service whose failure ended the run, or with the logs' folder."""
    state = where.folder.read()
    if isinstance(error, RunFailedError) and error.role and state is not None:
        for service in state.services:
            if service.name == error.instance or (service.role == error.role and not error.instance):
                return stack.failure(where.folder, service.name, error.message)
    return error if error.hint else CliError(error.message, f"all logs are in {where.folder.logs}")


def result_table(folder: Path) -> Table:
    """Return a table of a run's results: values before and after training, dropped groups."""
    result = read_result(folder)
    summary = result.summary
    table = Table(title=f"run {summary.get('run_id')}", title_justify="left", show_header=True, header_style="dim")
    for title in ("", "before", "after", "change"):
        table.add_column(title, justify="right" if title else "left")

    def add(label: str, before: float, after: float, digits: int = 2) -> None:
        change = Text(f"{after - before:+.{digits}f}", "bold green" if after > before else "")
        table.add_row(label, f"{before:.{digits}f}", f"{after:.{digits}f}", change)

    held_out, sets = results(summary), _first_and_last(result.set_rows)
    for name, before, after in held_out:
        add(f"held-out {name}", before, after)
    for first, last in sets:
        for name in ("reward", *last.estimates[:1]):
            add(f"{last.name} {shown_name(name)}", first.values.get(name, math.nan), last.values[name])
    rewards = [step["reward_mean"] for step in result.steps]
    if not held_out and not sets and len(rewards) > 1:
        shown = min(SHOWN_STEPS, len(rewards) // 2)
        add("training reward", fmean(rewards[:shown]), fmean(rewards[-shown:]), digits=3)
    table.add_section()
    table.add_row("steps", "", str(summary.get("steps")), "")
    table.add_row("wall time", "", f"{summary.get('wall_seconds', 0):.0f} s", "")
    for name in ("published", "trained", "dropped", "in_flight"):
        table.add_row(f"groups {name.replace('_', ' ')}", "", str(summary.get(name)), "")
    published = summary.get("published") or 0
    for reason, count in sorted((summary.get("dropped_by_reason") or {}).items(), key=lambda item: -item[1]):
        table.add_row(f"  {reason}", "", f"{count} ({count / max(1, published):.0%})", "")
    return table


def _first_and_last(rows: Sequence[SetRow]) -> list[tuple[SetRow, SetRow]]:
    """Return the first and the last result on each evaluation set of [[eval.sets]] that was evaluated several times."""
    sets: dict[str, list[SetRow]] = {}
    for row in rows:
        if row.name != HELD_OUT:
            sets.setdefault(row.name, []).append(row)
    return [(of_set[0], of_set[-1]) for of_set in sets.values() if len(of_set) > 1]


def result_paths(folder: Path) -> list[str]:
    """Return a line with kind and path for each of a run's result files."""
    names = {"report": "report.html", "curve": "curve.png", "model": "model", "summary": "summary.json"}
    here = Path.cwd()
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return [f"{name:<8} {shown / path}" for name, path in names.items() if (folder / path).exists()]


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths, and with the texts of chat templates in place of their files.

    The coordinator may run in another folder. Raises DataError.
    """
    config = with_template_texts(config)

    def absolute(path: Path | None) -> Path | None:
        return path if path is None or is_hub_path(path) else path.expanduser().resolve()

    def absolute_model(name: str) -> str:
        folder = Path(name).expanduser()
        return str(folder.resolve()) if name and folder.is_dir() else name

    roles = {
        role: own.model_copy(update={"model": absolute_model(own.model)}) for role, own in config.roles.sizes.items()
    }
    sources = tuple(one.model_copy(update={"path": absolute(one.path)}) for one in config.data.sources)
    sets = tuple(one.model_copy(update={"path": absolute(one.path)}) for one in config.eval.sets)
    data = {
        "path": absolute(config.data.path),
        "eval_path": absolute(config.data.eval_path),
        "sources": sources,
    }
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": absolute(config.run.folder)}),
            "model": config.model.model_copy(update={"path": absolute_model(config.model.path)}),
            "roles": config.roles.model_copy(update=roles),
            "data": config.data.model_copy(update=data),
            "eval": config.eval.model_copy(update={"sets": sets}),
        }
    )


def _replicas(where: Where, config: RunConfig) -> dict[str, int]:
    """Return the number of replicas by role: of services that run on this machine, else of those to start."""
    if state := where.folder.read():
        return Counter(service.role for service in state.services)
    return placed_replicas(config, where.replicas)


def _engines(config: RunConfig) -> dict[str, str]:
    """Return the configured engine by role, for roles whose engine can be chosen."""
    return {name: role.engine(config) for name, role in ROLES.items() if role.modules}


def _with_shared_cores(config: RunConfig, replicas: Mapping[str, int]) -> RunConfig:
    """Return the configuration with numbers of threads that divide this machine's cores.

    The trainer's ranks, the engines and the ranks of other models share the cores, as they work at the same time.
    """
    needed = roles_for(config)
    sizes = {role: own for role, own in config.roles.sizes.items() if role in needed}
    ranks = config.trainer.ranks + max(1, replicas.get(ROLLOUT, 0))
    ranks += sum(replicas.get(role, 0) * own.ranks for role, own in sizes.items())
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    trainer = config.trainer.model_copy(update={"threads": config.trainer.threads or threads})
    rollout = config.rollout.model_copy(update={"threads": config.rollout.threads or threads})
    roles = config.roles.model_copy(
        update={role: own.model_copy(update={"threads": own.threads or threads}) for role, own in sizes.items()}
    )
    return config.model_copy(update={"trainer": trainer, "rollout": rollout, "roles": roles})
