"""`python -m tests.chaos.failure_table`: the table of failures in docs/reliability.md, from the last long run."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median

from benchmarks.reporting import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- failures: written by python -m tests.chaos.failure_table -->", "<!-- failures: end -->"

# What dies, the faults that do it, what happens. What is lost is the same for all: that is the promise.
FAILURES: list[tuple[str, tuple[str, ...], str]] = [
    (
        "a rollout, reward or advantage replica",
        ("kill rollout", "kill reward", "kill advantage", "kill both *", "restart rollout"),
        "its supervisor starts another; the groups that it held go to others as soon as it is known to be gone, at the "
        "latest when their lease ends; of a drain, nothing is begun anew",
    ),
    (
        "an engine's process, a reward's worker",
        ("kill engine", "kill reward worker"),
        "its service starts another; the engine's groups are begun anew, the worker's sample is tried once more",
    ),
    (
        "a replica stands still (SIGSTOP), for less and for more than its leases",
        ("stall rollout *", "stall reward *", "stall advantage *", "stall engine *"),
        "others take its groups over when the lease ends; what it commits when it wakes up is acknowledged and changes "
        "nothing; one that is silent for longer than `--lease-seconds` is restarted",
    ),
    (
        "an engine's process stands still for good, while its service answers",
        ("freeze engine",),
        "the trainer goes on with the other engines; the coordinator restarts the replica when nothing that it holds "
        "gets done (`health.stuck_seconds`) or synchronisations with it keep failing (`health.max_sync_failures`)",
    ),
    (
        "the trainer, or one of its ranks",
        ("kill trainer*", "kill a rank*"),
        "a new term: newest intact checkpoint, the steps since from their files, then a forced synchronisation; the "
        "step that was open begins anew",
    ),
    (
        "the trainer stands still",
        ("stall trainer*",),
        "it goes on; publishing stops at the gate meanwhile; one that is silent for too long is restarted",
    ),
    (
        "a gradient overflows",
        ("overflow a gradient",),
        "the update is skipped on all ranks, the step is committed as skipped, and so it is replayed; "
        "`trainer.max_skipped_updates`",
    ),
    (
        "the coordinator",
        ("kill coordinator", "restart coordinator"),
        "its supervisor starts another, which takes the next term and goes on from Redis; stages and trainer work on "
        "with what is published",
    ),
    (
        "the coordinator stands still",
        ("stall coordinator *",),
        "the same, without a restart; it grants everybody a new lease when it wakes up",
    ),
    (
        "Redis, killed or restarted",
        ("kill redis", "restart redis"),
        "everybody waits and tries again; its append-only file has everything",
    ),
    ("Redis stands still", ("stall redis *",), "everybody waits and tries again"),
    (
        "Redis is full",
        ("fill redis",),
        "nothing is published; what makes room (commits, steps) is still allowed; it goes on when there is room",
    ),
    (
        "Redis refuses writes: its disk is full, it is a replica, a script keeps it busy",
        ("redis: *",),
        "everybody waits, says for what, and tries again",
    ),
    (
        "connections to Redis: reset, late, swallowed",
        ("cut: * - redis", "delay: * - redis", "drop: * - redis"),
        "the operation is repeated, which never does it twice; groups of a replica that is away longer than its lease "
        "go to others",
    ),
    (
        "connections to the coordinator, in both directions",
        ("cut: * - coordinator", "delay: * - coordinator", "drop: * - coordinator", "reset all connections"),
        "work goes on; a replica that was forgotten registers again; an engine that can't be reached is left out of "
        "synchronisations",
    ),
    (
        "an engine in a weight synchronisation (join, pause, broadcast, commit, resume)",
        ("sync: engine *", "sync: rollout *"),
        "everybody leaves the group, it is built anew from the rest, and the broadcast repeated; the trainer goes on",
    ),
    (
        "the trainer in the middle of a broadcast",
        ("sync: rank *", "sync: trainer *"),
        "engines that were touched serve nothing until the next trainer's first synchronisation",
    ),
    (
        "the coordinator in the middle of a synchronisation",
        ("sync: coordinator *",),
        "the next coordinator aborts the one on record and begins another",
    ),
]


def table(document: dict) -> str:
    """The table as Markdown. Raises ValueError: a kind of fault is in no row."""
    outcomes = document["outcomes"]
    rest = {outcome["fault"] for outcome in outcomes}
    lines = [
        "| what fails | what happens | lost | times | trains again after (p50 / max) | deliveries repeated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for what, patterns, happens in FAILURES:
        found = [o for o in outcomes if any(fnmatchcase(o["fault"], pattern) for pattern in patterns)]
        rest -= {outcome["fault"] for outcome in found}
        seconds = [outcome["recovery"] for outcome in found if outcome["recovery"] is not None]
        figures = f"{median(seconds):.1f} s / {max(seconds):.1f} s" if seconds else "not measured"
        violations = sum(outcome["violations"] for outcome in found)
        lost = "not measured" if not found else "nothing" if not violations else f"{violations} violations"
        recomputed = sum(outcome["recomputed"] for outcome in found)
        lines.append(f"| {what} | {happens} | {lost} | {len(found)} | {figures} | {recomputed} |")
    if rest:
        raise ValueError(f"no row has the faults {', '.join(sorted(rest))}")
    machine, groups = document["machine"], document["groups"]["trained"]
    lines += [
        "",
        f"{document['faults']} faults (`make chaos`, seed {document['seed']}) on {document['date']}, "
        f"{machine['cores']} cores ({machine['processor']}, load {machine['load_before']} before): "
        f"{document['violations']} violations in {document['steps']} steps with {groups} groups.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Rewrite the table."""
    document = json.loads((RESULTS / "chaos.json").read_text())
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no lines {BEGIN} and {END}")
    PAGE.write_text(f"{before}{BEGIN}\n{table(document)}\n{END}{after}")


if __name__ == "__main__":
    main()
