"""Where a run's time went: by step, for the trainer, for the groups on their way to it, and for every device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Steps = Sequence[Mapping[str, Any]]
"""Metrics of steps, as in metrics.jsonl."""


@dataclass(frozen=True)
class Part:
    """A part of a whole: a step metric in seconds."""

    name: str
    """The metric; "" is what the others leave of the whole."""
    label: str
    color: str


@dataclass(frozen=True)
class Whole:
    """Something that takes time, and its parts."""

    title: str
    name: str
    """The metric of the whole, in seconds."""
    parts: tuple[Part, ...]


TRAINER = Whole(
    "the trainer's step",
    "step_seconds",
    (
        Part("train_seconds", "forward, backward, optimizer", "#2563eb"),
        Part("wait_seconds", "waiting for groups", "#f59e0b"),
        Part("asleep_seconds", "asleep: the engines' turn", "#fcd34d"),
        Part("sync_wait_seconds", "waiting for a weight broadcast", "#dc2626"),
        Part("checkpoint_seconds", "standing still for a checkpoint", "#7c3aed"),
        Part("step_file_seconds", "writing the step file", "#a78bfa"),
        Part("", "other: intake, commit, planning", "#9ca3af"),
    ),
)
GROUP = Whole(
    "a group's way (mean)",
    "group_seconds",
    (
        Part("queue_rollout_seconds", "queue: rollout", "#fde68a"),
        Part("generate_seconds", "generate", "#16a34a"),
        Part("queue_reward_seconds", "queue: reward", "#fcd34d"),
        Part("score_seconds", "score", "#0891b2"),
        Part("queue_advantage_seconds", "queue: advantage", "#fbbf24"),
        Part("advantage_seconds", "advantage", "#7c3aed"),
        Part("queue_train_seconds", "queue: train", "#f59e0b"),
        Part("in_step_seconds", "in its step", "#2563eb"),
        Part("", "other: commits, attempts that failed", "#9ca3af"),
    ),
)
SHARES = {
    "trainer_idle_share": ("trainer: not computing", "#2563eb"),
    "engine_idle_share": ("engines: idle", "#16a34a"),
    "engine_paused_share": ("engines: paused for weights", "#dc2626"),
    "gpu_idle_share": ("GPUs: no kernel runs (NVML)", "#111827"),
}
"""Label and color of what is a share of the step's time; those of single replicas come with the table."""
PER_REPLICA = ("engine_idle_share_", "gpu_idle_share_")


def part_seconds(step: Mapping[str, Any], whole: Whole) -> list[float]:
    """What each part of a whole took in a step, in seconds; 0 for one that the step doesn't have."""
    known = {part.name: float(step.get(part.name) or 0.0) for part in whole.parts if part.name}
    rest = max(0.0, float(step.get(whole.name) or 0.0) - sum(known.values()))
    return [known.get(part.name, rest) for part in whole.parts]


def mean_rows(steps: Steps, whole: Whole) -> list[tuple[Part, float, float]]:
    """Each part with its mean seconds and its share of the whole; those that never took time are left out."""
    told = [part_seconds(step, whole) for step in steps if step.get(whole.name)]
    if not told:
        return []
    sums = [sum(values) for values in zip(*told, strict=True)]
    total = sum(sums)
    return [
        (part, value / len(told), value / total)
        for part, value in zip(whole.parts, sums, strict=True)
        if value > 0 and total > 0
    ]


def share_rows(steps: Steps) -> list[tuple[str, float]]:
    """Label and mean, weighted by the steps' seconds, of each share of time; then those of single replicas."""
    rows = [("weight synchronisation: share of a step", _weight_sync_share(steps))]
    rows += [(label, _mean_share(steps, name)) for name, (label, _) in SHARES.items()]
    names = sorted({name for step in steps for name in step if name.startswith(PER_REPLICA)})
    rows += [(_replica_label(name), _mean_share(steps, name)) for name in names]
    return [(label, share) for label, share in rows if share is not None]


def tables(steps: Steps) -> list[Table]:
    """What there is to say, for the terminal."""
    found = []
    for whole in (TRAINER, GROUP):
        rows = mean_rows(steps, whole)
        if not rows:
            continue
        table = _table(whole.title, "mean s", "share")
        for part, seconds, share in rows:
            table.add_row(part.label, f"{seconds:.3f}", f"{share:.1%}")
        table.add_section()
        table.add_row("all of it", f"{sum(seconds for _, seconds, _ in rows):.3f}", "")
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
    told = [step for step in steps if step.get("sync_seconds") is not None and step.get("step_seconds")]
    total = sum(step["step_seconds"] for step in told)
    return sum(step["sync_seconds"] for step in told) / total if total else None


def _mean_share(steps: Steps, name: str) -> float | None:
    told = [(step[name], step.get("step_seconds") or 0.0) for step in steps if step.get(name) is not None]
    total = sum(seconds for _, seconds in told)
    return sum(share * seconds for share, seconds in told) / total if total else None


def _replica_label(name: str) -> str:
    what, _, replica = name.partition("_idle_share_")
    return f"{replica}: idle" if what == "engine" else f"GPUs of {replica}: no kernel runs"
