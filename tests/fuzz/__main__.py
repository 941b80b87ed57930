"""`python -m tests.fuzz --messages 100000`: attack every call of every service, and say how it took it.

Ends with a table of the calls (messages, statuses) and one of the processes (memory, open files); with code 1 if a
service answered bad input with UNKNOWN or INTERNAL, crashed, leaked, or could not go on with its run afterwards.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.coordinator.state.store import MAX_BOARDS
from tests.fuzz.attack import LEFT_OUT, TOGETHER, Report, attack
from tests.fuzz.fleet import Fleet, fleet

WARM_UP = 3000
"""Messages after which memory and files are counted from: caches fill, workers start."""
MAX_GROWTH_BYTES = 128 << 20
MAX_NEW_FILES = 24
MAX_REDIS_CONNECTIONS = (MAX_BOARDS + 2) * TOGETHER
"""Of a coordinator: as many as calls at once for each run that it keeps connected, the active one, its own state."""


def leaks(before: dict[str, tuple[int, int, int]], after: dict[str, tuple[int, int, int]]) -> list[str]:
    """What grew that should not."""
    found = []
    for name, (rss, files, children) in after.items():
        old_rss, old_files, old_children = before[name]
        if rss - old_rss > MAX_GROWTH_BYTES:
            found.append(f"{name}: memory grew from {old_rss >> 20} to {rss >> 20} MiB")
        if files - old_files > MAX_NEW_FILES:
            found.append(f"{name}: open files grew from {old_files} to {files}")
        if children > old_children + 2:
            found.append(f"{name}: {children} processes below it, where there were {old_children}")
    return found


def problems_of(victims: Fleet, report: Report, before: dict[str, tuple[int, int, int]]) -> list[str]:
    """Everything that is not as it has to be after an attack."""
    problems = [f"{what} ({count} times): {example}" for what, (count, example) in report.wrong.items()]
    problems += leaks(before, victims.resources())
    for name in victims.attacked:
        if (count := victims.redis_connections(name)) > MAX_REDIS_CONNECTIONS:
            problems.append(f"{name}: {count} connections to Redis")
    problems += victims.bugs()
    victims.alive()
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000, help="messages to send in all")
    parser.add_argument("--seed", type=int, default=1, help="of the messages")
    parser.add_argument("--minutes", type=float, default=0, help="end after so long, whatever is left; 0 is no limit")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # which ends the services, too
    console = Console()
    with tempfile.TemporaryDirectory(prefix="relaxd-fuzz-", ignore_cleanup_errors=True) as folder:
        console.print(f"seed {arguments.seed}; starting the services ...")
        with fleet(Path(folder)) as victims:
            return _attack(console, victims, arguments.messages, arguments.seed, 60 * arguments.minutes)


def _attack(console: Console, victims: Fleet, messages: int, seed: int, seconds: float) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("warming up", total=max(WARM_UP, messages // 5))
        asyncio.run(
            attack(
                victims,
                max(WARM_UP, messages // 5),
                seed + 1,
                told=lambda r: progress.update(task, completed=r.messages),
            )
        )
        before = victims.resources()
        task = progress.add_task("attacking", total=messages)

        shown: set[str] = set()

        def told(report: Report) -> None:
            progress.update(task, completed=report.messages, description=f"attacking ({len(report.wrong)} wrong)")
            for what in report.wrong.keys() - shown:  # at once: a long attack that is stopped has said it
                shown.add(what)
                console.print(f"after {report.messages}: {what}: {report.wrong[what][1]}", markup=False)

        begun = time.monotonic()
        report = asyncio.run(attack(victims, messages, seed, seconds=seconds, told=told))
        seconds = time.monotonic() - begun
    after = victims.resources()
    problems = problems_of(victims, report, before)
    console.print(_calls(report, seconds), _processes(before, after))
    for path, why in LEFT_OUT.items():
        console.print(f"left out: {path}: it {why}")
    for problem in problems[:50]:
        console.print(f"[red]wrong:[/red] {problem}", markup=True, highlight=False)
    verdict = f"{len(problems)} wrong" if problems else "nothing wrong"
    console.print(f"{report.messages} messages, seed {seed}, {seconds:.0f} s: {verdict}; the run goes on")
    return 1 if problems else 0


def _calls(report: Report, seconds: float) -> Table:
    table = Table(title=f"{report.messages} messages in {seconds:.0f} s")
    for name in ("call", "messages", "statuses", "slowest, s"):
        table.add_column(name, justify="right" if name in ("messages", "slowest, s") else "left")
    for path, tally in sorted(report.calls.items()):
        statuses = ", ".join(f"{code} {count}" for code, count in tally.statuses.most_common())
        table.add_row(
            path.removeprefix("/relaxd.v1."), str(tally.statuses.total()), statuses, f"{tally.slowest_seconds:.2f}"
        )
    return table


def _processes(before: dict[str, tuple[int, int, int]], after: dict[str, tuple[int, int, int]]) -> Table:
    table = Table(title="memory and open files, after the warm-up and at the end")
    for name in ("service", "MiB", "files", "children"):
        table.add_column(name, justify="left" if name == "service" else "right")
    for name, now in after.items():
        then = before[name]
        table.add_row(name, f"{then[0] >> 20} -> {now[0] >> 20}", f"{then[1]} -> {now[1]}", f"{then[2]} -> {now[2]}")
    return table


if __name__ == "__main__":
    sys.exit(main())
