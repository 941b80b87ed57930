"""The best checkpoint of a run: which evaluation metric decides, and which checkpoint it names.

The coordinator evaluates, the trainer removes checkpoints. They share the run's record in run.json: evaluations are
only ever added, and `evaluating` is the version whose checkpoint has no result yet. Neither removes checkpoints in
`protected_steps`, so a crash of either loses no checkpoint that is, or may become, the best.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaxd.run_folder import HELD_OUT, RECORD, checkpoint_steps

SHARED_METRICS = ("reward", "response_length", "truncated_share", "unscored")
"""Metrics of every evaluation set that can decide which version is best."""
_RULE = (
    'it must be "eval.SET.METRIC", such as "eval.held_out.reward", or "-eval.SET.METRIC" for one that is best when '
    "it is lowest"
)


@dataclass(frozen=True)
class WatchedMetric:
    """Evaluation metric that decides which version is best."""

    set_name: str
    metric: str
    """Name of the metric within the set, such as "reward"."""
    lowest: bool = False
    """True if the metric's lowest value is the best, False if the highest is."""

    @property
    def key(self) -> str:
        """Name of the metric in an evaluation's results, such as "eval/math500/reward"."""
        return f"eval_{self.metric}" if self.set_name == HELD_OUT else f"eval/{self.set_name}/{self.metric}"

    def is_better(self, value: float, than: float, *, by: float = 0.0) -> bool:
        """Return True if the metric's value `value` is better than `than` by more than `by`."""
        return (than - value if self.lowest else value - than) > by

    def values(self, evaluations: Iterable[Mapping[str, Any]]) -> dict[int, float]:
        """Return the metric's values by step, from the evaluations in run.json, without the initial model's value."""
        return {
            one["step"]: one["metrics"][self.key]
            for one in sorted(evaluations, key=lambda one: int(one["step"]))
            if one["step"] > 0 and self.key in one["metrics"]
        }

    def best(self, values: Mapping[int, float]) -> int | None:
        """Return the step with the metric's best value, the earliest of equal ones; None if there are no values."""
        found = None
        for step in sorted(values):
            if found is None or self.is_better(values[step], values[found]):
                found = step
        return found


def parse_metric(text: str) -> WatchedMetric:
    """Parse "eval.SET.METRIC" or "-eval.SET.METRIC". Raises ValueError."""
    parsed = re.fullmatch(r"(-?)eval\.(.+)\.([^.]+)", text)
    if parsed is None:
        raise ValueError(_RULE)
    return WatchedMetric(parsed[2], parsed[3], lowest=bool(parsed[1]))


def metric_problem(text: str, sets: Mapping[str, tuple[int, Sequence[int]]]) -> str:
    """Return why a metric can't be watched, or "".

    Args:
        text: as `parse_metric` takes it.
        sets: samples per prompt, and the k of pass@k and maj@k, by name of the evaluation set.
    """
    try:
        metric = parse_metric(text)
    except ValueError as error:
        return str(error)
    if metric.set_name not in sets:
        return f"there is no evaluation set {metric.set_name!r}, there are {', '.join(sets) or 'none'}"
    samples, sizes = sets[metric.set_name]
    known = [*SHARED_METRICS, *(f"pass_at_{k}" for k in sizes)]
    known += [f"maj_at_{k}" for k in sizes] if samples > 1 else []
    if metric.metric not in known:
        return f"the set {metric.set_name!r} has no metric {metric.metric!r}, it has {', '.join(known)}"
    return ""


@dataclass(frozen=True)
class BestCheckpoint:
    """Best checkpoint of a run, and the value of the watched metric there."""

    step: int
    value: float


def find_best(run_folder: Path, setting: str, steps: Collection[int]) -> BestCheckpoint | None:
    """Return the best checkpoint among those of `steps`; None if none of these checkpoints was evaluated.

    Args:
        run_folder: the run's folder.
        setting: trainer.checkpoint.keep_best; "" has no best.
        steps: steps of complete checkpoints.
    """
    if not setting:
        return None
    metric = parse_metric(setting)
    values = metric.values(_read_record(run_folder).get("evaluations", ()))
    values = {step: value for step, value in values.items() if step in steps}
    best = metric.best(values)
    return None if best is None else BestCheckpoint(best, values[best])


def protected_steps(run_folder: Path, setting: str, checkpoints_of: Path) -> set[int]:
    """Return the steps whose checkpoints must not be removed: of the best checkpoint, and of any being evaluated.

    `checkpoints_of` is the folder with the checkpoints: the run's, or its critic's.
    """
    if not setting:
        return set()
    best = find_best(run_folder, setting, checkpoint_steps(checkpoints_of))
    under_evaluation = int(_read_record(run_folder).get("evaluating", 0))
    return {step for step in (best.step if best else 0, under_evaluation) if step}


def _read_record(run_folder: Path) -> dict[str, Any]:
    """Return the content of the run's run.json; {} if there is no such file yet. Raises OSError, ValueError."""
    try:
        found = json.loads((run_folder / RECORD).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{run_folder / RECORD} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{run_folder / RECORD} can't be read: it is no record")
    return found
