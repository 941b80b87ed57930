"""`relaxd fit`: what each GPU of a run will hold, before it starts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from relaxd.cli.options import WordsArgument, data_errors, load_words, new_console
from relaxd.cli.output import show
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError
from relaxd.local.placement import placed_replicas, placement_problems
from relaxd.roles import JUDGE, ROLES
from relaxd.tools.fitting.fit import Fit
from relaxd.tools.fitting.fit import fit as compute
from relaxd.tools.fitting.trainer_memory import FitError, Hardware, Held

SHOWN_LAYOUTS = 5
SHOWN_STAGES = 3
"""Maximum number of a pipeline's stages to show: the first ones and the last."""
GIB = 1 << 30


def fit(
    words: WordsArgument,
    gpu_gib: Annotated[float, typer.Option(min=1, help="Memory of a GPU in GiB: 80 (H100), 141 (H200).")] = 80,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=64, help="GPUs of a host.")] = 8,
    judge: Annotated[
        int | None, typer.Option(min=1, help="Replicas of the judge, if the run has one; default: its placement's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> None:
    """Say what each GPU will hold, whether it fits, and which layout of the trainer would be the fastest that does."""
    path, config = load_words(words)
    given = {} if judge is None else {JUDGE: judge}
    if problems := placement_problems(config, given):
        raise ConfigError(problems)
    replicas = placed_replicas(config, given)
    try:
        with data_errors():
            found = compute(config, Hardware(int(gpu_gib * GIB), gpus_per_node), max(1, replicas[JUDGE]))
    except FitError as error:
        raise CliError(str(error)) from error
    if as_json:
        show(json.dumps(as_dictionary(found), indent=2))
    else:
        console = new_console()
        _print(path, found, gpu_gib, console)
        console.print(f"it starts: {_started(config, replicas)}", soft_wrap=True)
        why = "" if config.trainer.micro_batch_tokens else " (trainer.micro_batch_tokens isn't set)"
        console.print(
            f"micro-batches of the trainer: {config.micro_batch_tokens:,} tokens at most{why}", soft_wrap=True
        )
    if not found.fits:
        raise typer.Exit(1)


def _started(config: RunConfig, replicas: Mapping[str, int]) -> str:
    """List the replicas of each role, with the GPUs of each replica if it has any."""
    parts = []
    for role, count in replicas.items():
        gpus = ROLES[role].gpus(config)
        each = f" of {gpus} GPU{'s' * (gpus > 1)}" if gpus else ""
        if count:
            parts.append(f"{role} {count}{each}")
    return ", ".join(parts)


def as_dictionary(found: Fit) -> dict[str, Any]:
    """Return the memory use of each GPU, and the other results of `relaxd fit`, as JSON values in bytes and seconds."""
    return {
        "fits": found.fits,
        "gpus": [
            {"role": one.role, "place": one.place, "bytes": one.bytes, "total": one.total, "room": one.room}
            for one in found.held
        ],
        "engines": {
            role: {
                "cached_tokens": one.memory.cached_tokens,
                "longest_sequence": one.longest,
                "longest_sequences": one.answers,
                "max_running_samples": one.running,
            }
            for role, one in found.engines.items()
        },
        "predicted_seconds": found.seconds.total,
        "layouts": [
            {
                "settings": one.layout.settings,
                "bytes": one.bytes,
                "predicted_seconds": one.seconds,
                "bytes_between_hosts": one.between_hosts,
            }
            for one in found.layouts
        ],
        "host": found.host,
        "between_hosts": found.between_hosts,
        "disk": found.disk,
    }


def _print(path: Path, found: Fit, gpu_gib: float, console: Console) -> None:
    verdict = "it fits" if found.fits else "it does not fit"
    console.print(f"{path.name} on GPUs of {gpu_gib:g} GiB: {verdict}\n")
    console.print(_gpus(_shown(found.held)))
    for role, one in found.engines.items():
        share = "" if not one.memory.assumed else ", if SGLang keeps 0.15 of the GPU free (set memory_fraction)"
        console.print(
            f"{role}: its cache has room for {one.memory.cached_tokens:,} tokens, or {one.answers:,} sequences of "
            f"{one.longest:,} tokens; at most {one.running:,} are in progress{share}",
            soft_wrap=True,
        )
    console.print(_layouts(found))
    title = "each of the trainer's hosts" if found.between_hosts else "the trainer's host"
    console.print(_amounts(f"{title}, about", found.host))
    if found.between_hosts:
        console.print(_amounts("sent to other hosts in a step", found.between_hosts))
    console.print(_amounts("the run's folder, about", found.disk))


def _shown(held: list[Held]) -> list[Held]:
    """Leave out GPUs of the inner stages of a long pipeline, which hold less than those of the first stage."""
    stages = [one for one in held if one.place.startswith("stage")]
    hidden = {id(one) for one in stages[SHOWN_STAGES - 1 : -1]} if len(stages) > SHOWN_STAGES else set()
    return [one for one in held if id(one) not in hidden]


def _gpus(held: list[Held]) -> Table:
    table = Table(title="what a GPU holds at most, in GiB", title_justify="left")
    table.add_column(style="dim")
    for one in held:
        table.add_column(f"{one.role}\n{one.place}", justify="right")
    for name in dict.fromkeys(name for one in held for name, size in one.bytes.items() if size):
        table.add_row(name, *(_gib(one.bytes.get(name, 0)) for one in held))
    table.add_section()
    table.add_row("all", *(_gib(one.total) for one in held))
    table.add_row("room", *(_gib(one.room) for one in held))
    table.add_row("", *("fits" if one.fits else "too much" for one in held))
    return table


def _layouts(found: Fit) -> Table:
    ranks = {one.layout.ranks for one in found.layouts}
    place = "hosts" if found.between_hosts else "a machine"
    title = "layouts of the trainer that fit" if found.layouts else f"no layout of the trainer fits on {place}"
    if ranks - {found.layout.ranks}:
        title = f"no layout of {found.layout.ranks} ranks fits; with {min(ranks)}"
    table = Table(title=title, title_justify="left")
    several = bool(found.between_hosts)
    for name in ("layout", "GiB", "seconds of a step, a prediction", *(["GiB to other hosts"] if several else [])):
        table.add_column(name, justify="left" if name == "layout" else "right")
    own = (f"{found.layout.name} (configured)", _fullest(found), found.seconds.total, sum(found.between_hosts.values()))
    others = [(one.layout.name, one.bytes, one.seconds, one.between_hosts) for one in found.layouts[:SHOWN_LAYOUTS]]
    for number, (name, size, seconds, crossing) in enumerate([own, *others]):
        row = (name, _gib(size), f"{seconds:,.2f}", *([_gib(crossing)] if several else []))
        table.add_row(*row, end_section=number == 0)
    return table


def _fullest(found: Fit) -> int:
    """Return the bytes that the fullest trainer GPU holds during training."""
    return max(one.total for one in found.held if one.role == "trainer" or one.place == "train")


def _amounts(title: str, amounts: Mapping[str, int]) -> Table:
    table = Table(title=f"{title}, in GiB", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, size in amounts.items():
        table.add_row(name, _gib(size))
    table.add_section()
    table.add_row("all", _gib(sum(amounts.values())))
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}" if size else ""
