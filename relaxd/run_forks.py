"""Forks of runs: extra files of a fork's folder, and the original run's metrics beside the fork's."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relaxd.run_folder import METRICS, read_lines, replace_file

FORK = "fork.json"
"""Name of the file in a fork's folder that describes the original run."""
REWARDS = "rewards.jsonl"
"""New reward columns, one line per group, if the fork has another reward."""
EFFECTIVE_SIZE = "policy_drift_ess"
"""Metric of the distance between recorded answers and the policy: 1 for the policy's own answers."""
COMPARED = ("reward_mean", "loss", "grad_norm", "entropy", EFFECTIVE_SIZE, "clip_fraction", "lr")
"""Metrics to compare with the original's."""

OF_ORIGINAL = " of original"
"""Suffix of the names of the original run's metrics."""


@dataclass(frozen=True)
class Fork:
    """The origin of a fork."""

    run_id: str
    """The original run."""
    folder: str
    """Folder of the original run."""
    step: int
    """Step of the original run after which the weights were taken."""
    settings: tuple[str, ...] = ()
    """The changed settings, each as NAME=VALUE."""


def write_fork(folder: Path, fork: Fork) -> None:
    """Write the origin of a fork into its folder. Raises OSError."""
    replace_file(folder / FORK, json.dumps(asdict(fork), indent=2) + "\n")


def read_fork(folder: Path) -> Fork | None:
    """Return the origin of a run; None if it isn't a fork."""
    try:
        found = json.loads((folder / FORK).read_text(encoding="utf-8"))
        return Fork(**found | {"settings": tuple(found["settings"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def with_original(folder: Path, lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield lines of a run's metrics; in a fork's lines add the original run's metrics, such as "loss of original"."""
    fork = read_fork(folder)
    originals = {} if fork is None else {line.get("step"): line for line in read_lines(Path(fork.folder) / METRICS)}
    for line in lines:
        original = originals.get(line.get("step"), {})
        yield {**line, **{f"{name}{OF_ORIGINAL}": original[name] for name in COMPARED if name in original}}
