"""`python -m tests.chaos --faults 200`, or a soak, `--minutes 60`. Ends with a table, and with 1 on a violation."""

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.reporting import RESULTS, machine
from tests.chaos.campaign import RECOVERY_SECONDS, Campaign, rows
from tests.chaos.faults import Fault, deck, faults_of, gentle
from tests.chaos.memory import WARM_UP_SECONDS, Memory
from tests.chaos.planes.choose import kinds_of
from tests.chaos.planes.primaries import PRIMARIES
from tests.chaos.plot import plot_memory, plot_recovery
from tests.chaos.proxy import Loop
from tests.chaos.stack import ALGORITHMS, COLUMNS, ChaosStack

KEPT = 20
"""Every how many-th sample of memory goes into the results file; the plot has all."""


def until(end: float, faults: Iterator[Fault]) -> Iterator[Fault]:
    """Faults until a time."""
    return itertools.takewhile(lambda _: time.monotonic() < end, faults)


def main() -> None:
    """Break the stack until told enough."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many")
    parser.add_argument("--minutes", type=float, default=0.0, help="for so long instead: a soak")
    parser.add_argument("--pause", type=float, default=None, help="seconds between faults (soak: 10)")
    parser.add_argument(
        "--deadline", type=float, default=RECOVERY_SECONDS, help="seconds to recover in; more on a busy machine"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the order and the victims")
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="only this kind (repeatable)")
    parser.add_argument(
        "--roles", default="", help="only faults whose names have one of these, such as critic,reference"
    )
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="grpo", help="what the run trains with")
    parser.add_argument(
        "--columns",
        choices=list(COLUMNS),
        default="small",
        help="large: all are payloads; on-nodes: on data nodes. Faults strike there",
    )
    parser.add_argument(
        "--redis", choices=list(PRIMARIES), default="single", help="what has replicas, and faults of primaries"
    )
    parser.add_argument("--gentle", action="store_true", help="only faults that end no process: to watch memory")
    parser.add_argument(
        "--warm-up", type=float, default=None, help="seconds of a process's life that don't count (60; gentle: 600)"
    )
    parser.add_argument("--logs", type=Path, default=Path("chaos-logs"), help="where results and logs of violations go")
    parser.add_argument("--folder", type=Path, default=None, help="for all files, which stay; else a temporary one")
    parser.add_argument("--list", action="store_true", help="list the kinds of faults")
    parser.add_argument("--result", default="", help="name of the results file; default: by algorithm and faults")
    parser.add_argument(
        "--record", action="store_true", help="write the results to benchmarks/results, not to the folder of logs"
    )
    options = parser.parse_args()
    kinds = kinds_of(options.algorithm, options.columns, options.redis)
    if options.list:
        print("\n".join(fault.name for fault in kinds))
        return
    try:
        of_roles = faults_of(options.roles.split(","), kinds) if options.roles else ()
    except ValueError as error:
        parser.error(f"--roles: {error}")
    soak = options.minutes > 0
    pause = options.pause if options.pause is not None else (10.0 if soak else 0.0)
    warm_up = options.warm_up if options.warm_up is not None else (600.0 if options.gentle else WARM_UP_SECONDS)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    console, facts, begun = Console(width=150), machine(), time.monotonic()
    console.print(f"seed {seed}")
    rng = random.Random(seed)
    count = 10**6 if soak else options.faults
    names = (*options.only, *of_roles) or (gentle(kinds) if options.gentle else ())
    try:
        faults = iter(deck(min(count, 10**4), rng, names, kinds))
    except ValueError as error:
        parser.error(f"--only: {error}")
    with ExitStack() as resources:
        folder = options.folder or Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="relaxd-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        loop = resources.enter_context(Loop())
        planes = {"columns": options.columns, "servers": options.redis}
        stack = resources.enter_context(ChaosStack(folder, loop, seed, options.algorithm, **planes))
        memory = resources.enter_context(Memory(stack))

        def say(text: str) -> None:
            minutes = (time.monotonic() - begun) / 60
            console.print(f"{minutes:6.1f} min  {text}", highlight=False, markup=False)

        total = "" if soak else f" of {count}"
        campaign = Campaign(stack, rng, options.logs, pause, options.deadline, say=say, total=total)
        campaign.begin()
        last: list[str] = []
        try:
            campaign.run(until(time.monotonic() + options.minutes * 60, faults) if soak else faults)
            last = campaign.end()
        finally:
            slopes = memory.slopes(warm_up)
            table = show(console, campaign)
            if soak:
                show_memory(console, slopes)
    violations = sum(len(outcome.violations) for outcome in campaign.outcomes) + len(last)
    for text in last:
        console.print(f"VIOLATION at the end: {text}")
    name = options.result or result_name(options)
    drops = {f"dropped: {why}": count for why, count in Counter(campaign.books.dropped.values()).most_common()}
    generated, trained = campaign.generated_tokens, round(campaign.books.conversation_tokens)
    tokens = {"generated": generated, "trained": trained} if generated else {}
    document = {
        "name": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": facts,
        "seed": seed,
        "algorithm": options.algorithm,
        "columns": options.columns,
        "redis": options.redis,
        "warm_up_seconds": warm_up,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "faults": len(campaign.outcomes),
        "violations": violations,
        "steps": len(campaign.books.steps),
        "groups": {"trained": len(campaign.books.trained), **drops},
        "recomputed": campaign.books.recomputed,
        "conversation_tokens": tokens,
        "most_payloads": campaign.payloads.most if campaign.payloads else {},
        "rows": table,
        "outcomes": [
            {
                "fault": outcome.fault,
                "recovery": _plain(outcome.recovery),
                "whole": _plain(outcome.whole),
                "stalled": _plain(outcome.stalled),
                "recomputed": outcome.recomputed,
                "violations": len(outcome.violations),
            }
            for outcome in campaign.outcomes
        ],
        "memory": {service: asdict(slope) for service, slope in slopes.items()},
        "memory_samples": {
            service: [(round(sample.time), round(sample.megabytes, 1)) for sample in samples[::KEPT]]
            for service, samples in sorted(memory.samples.items())
        }
        if soak
        else {},
        "last": last,
    }
    results = RESULTS if options.record else options.logs
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if campaign.outcomes:
        plot_recovery(campaign.outcomes, results / f"{name}.png")
    if soak and memory.samples:
        plot_memory(memory.samples, results / f"{name}-memory.png")
    console.print(
        f"{len(campaign.outcomes)} faults, {violations} violations, {len(campaign.books.steps)} steps, "
        f"{len(campaign.books.trained)} groups trained, {drops}, seed {seed}"
    )
    if generated:
        wasted = 1 - trained / generated
        console.print(f"{generated} tokens seen generated, {trained} trained: at least {wasted:.3f} were wasted")
    sys.exit(1 if violations else 0)


def result_name(options: argparse.Namespace) -> str:
    """Return the name of the results file: one for each combination of algorithm and faults.

    Examples are "chaos" and "soak-ppo-roles-critic".
    """
    parts = ["soak" if options.minutes > 0 else "chaos"]
    if options.algorithm != "grpo":
        parts.append(options.algorithm)
    if options.redis != "single":
        parts.append(options.redis)
    if options.columns != "small":
        parts.append(f"{options.columns}-columns")
    if options.roles:
        parts += ["roles", *sorted(options.roles.split(","))]
    return "-".join([*parts, "only"] if options.only else parts)


def show(console: Console, campaign: Campaign) -> list[dict[str, object]]:
    """Print the table of faults, and return it for JSON."""
    table = Table(
        title="seconds without a step; from a fault's end (of a kill: from the kill) until training, until whole"
    )
    found = rows(campaign.outcomes)
    for column in found[0]:
        table.add_column(column, justify="left" if column == "fault" else "right")
    for row in found:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    return [{key: _plain(value) for key, value in row.items()} for row in found]


def show_memory(console: Console, slopes: dict) -> None:
    """Print the growth of every process."""
    table = Table(title="memory: growth after warm-up, a level for each life")
    for column in ("process", "MB", "MB/hour", "± error", "hours"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name, slope in slopes.items():
        table.add_row(
            name, f"{slope.last:.0f}", f"{slope.megabytes_per_hour:+.1f}", f"{slope.error:.1f}", f"{slope.hours:.2f}"
        )
    console.print(table)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 2)
    return value


if __name__ == "__main__":
    main()
