"""Breakdown of a run's time: of the trainer's steps, of the groups' stages, and shares per device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Steps = Sequence[Mapping[str, Any]]
"""One mapping per step: the step's metrics by name, as in metrics.jsonl."""


@dataclass(frozen=True)
class BreakdownPart:
    """One component of a time breakdown, such as forward and backward: a step metric in seconds."""

    name: str
    """Name of the step metric; "" for the rest of the duration, which the other parts leave."""
    label: str


@dataclass(frozen=True)
class Breakdown:
    """A duration, such as the trainer's step, and the components that add up to it."""

    title: str
    name: str
    """Name of the step metric with the whole duration, in seconds."""
    parts: tuple[BreakdownPart, ...]


TRAINER = Breakdown(
    "the trainer's step",
    "step_seconds",
    (
        BreakdownPart("train_seconds", "forward, backward, optimizer"),
        BreakdownPart("wait_seconds", "waiting for groups"),
        BreakdownPart("asleep_seconds", "asleep: the engines' turn"),
        BreakdownPart("sync_wait_seconds", "waiting for a weight broadcast"),
        BreakdownPart("checkpoint_seconds", "blocked by a checkpoint"),
        BreakdownPart("step_file_seconds", "writing the step file"),
        BreakdownPart("", "other: intake, commit, planning"),
    ),
)
GROUP = Breakdown(
    "a group's stages (mean)",
    "group_seconds",
    (
        BreakdownPart("queue_rollout_seconds", "queue: rollout"),
        BreakdownPart("generate_seconds", "generate"),
        BreakdownPart("queue_reward_seconds", "queue: reward"),
        BreakdownPart("score_seconds", "score"),
        BreakdownPart("queue_advantage_seconds", "queue: advantage"),
        BreakdownPart("advantage_seconds", "advantage"),
        BreakdownPart("queue_train_seconds", "queue: train"),
        BreakdownPart("in_step_seconds", "in its step"),
        BreakdownPart("", "other: commits, failed attempts"),
    ),
)
SHARES = {
    "trainer_idle_share": "trainer: not computing",
    "engine_idle_share": "engines: idle",
    "engine_paused_share": "engines: paused for weights",
    "gpu_idle_share": "GPUs: no kernel running (NVML)",
}
"""Displayed label of each metric that is a share of the step's time, over all replicas."""
PER_REPLICA = {"engine_idle_share": "{replica}: idle", "gpu_idle_share": "GPUs of {replica}: no kernel running"}
"""Displayed label of each metric that a step also records per replica; "{replica}" stands for the replica's id."""


def replica_values(step: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a step's values of a metric by replica id; {} if the step had too many replicas to record them."""
    values: Mapping[str, Any] = (step.get("replicas") or {}).get(name, {})
    return values


def part_seconds(step: Mapping[str, Any], whole: Breakdown) -> list[float]:
    """Return the seconds that a step spent on each part of a breakdown; 0 for a missing metric."""
    known = {part.name: float(step.get(part.name) or 0.0) for part in whole.parts if part.name}
    rest = max(0.0, float(step.get(whole.name) or 0.0) - sum(known.values()))
    return [known.get(part.name, rest) for part in whole.parts]


def mean_rows(steps: Steps, whole: Breakdown) -> list[tuple[BreakdownPart, float, float]]:
    """Return each part with its mean seconds and share of the whole; omit parts that took no time in any step."""
    seconds = [part_seconds(step, whole) for step in steps if step.get(whole.name)]
    if not seconds:
        return []
    sums = [sum(values) for values in zip(*seconds, strict=True)]
    total = sum(sums)
    return [
        (part, value / len(seconds), value / total)
        for part, value in zip(whole.parts, sums, strict=True)
        if value > 0 and total > 0
    ]


def share_rows(steps: Steps) -> list[tuple[str, float]]:
    """Return (label, mean) of each share over all replicas, then of single replicas. Step times weight the means."""
    rows = [("weight synchronisation: share of a step", _weight_sync_share(steps))]
    rows += [(label, _mean_share(steps, name)) for name, label in SHARES.items()]
    for name, label in PER_REPLICA.items():
        for replica in sorted({one for step in steps for one in replica_values(step, name)}):
            of_replica = [{**step, name: replica_values(step, name).get(replica)} for step in steps]
            rows.append((label.format(replica=replica), _mean_share(of_replica, name)))
    return [(label, share) for label, share in rows if share is not None]


def tables(steps: Steps) -> list[Table]:
    """Return tables of the steps' time breakdowns and shares, for the terminal."""
    found = []
    for whole in (TRAINER, GROUP):
        rows = mean_rows(steps, whole)
        if not rows:
            continue
        table = _table(whole.title, "mean s", "share")
        for part, seconds, share in rows:
            table.add_row(part.label, f"{seconds:.3f}", f"{share:.1%}")
        table.add_section()
        table.add_row("total", f"{sum(seconds for _, seconds, _ in rows):.3f}", "")
        found.append(table)
    if rows_of_shares := share_rows(steps):
        table = _table("of the time of all steps", "share")
        for label, value in rows_of_shares:
            table.add_row(label, f"{value:.1%}")
        found.append(table)
    return found


def _table(title: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="dim")
    table.add_column("")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _weight_sync_share(steps: Steps) -> float | None:
    synced = [step for step in steps if step.get("sync_seconds") is not None and step.get("step_seconds")]
    total = sum(step["step_seconds"] for step in synced)
    return sum(step["sync_seconds"] for step in synced) / total if total else None


def _mean_share(steps: Steps, name: str) -> float | None:
    shares = [(step[name], step.get("step_seconds") or 0.0) for step in steps if step.get(name) is not None]
    total = sum(seconds for _, seconds in shares)
    return sum(share * seconds for share, seconds in shares) / total if total else None
