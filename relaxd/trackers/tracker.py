"""The interface of trackers, and the description of a run for them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from relaxd.importing import ImportProblem, import_own

SECRET = re.compile(r"(?i)(^|[_-])(api[_-]?key|password|passwd|secret|token|authorization|credentials?)$")
"""Name patterns of settings with secret values."""
VARIABLE = re.compile(r"(^|_)address_token$")
"""Name patterns of settings with the name of an environment variable that has a secret."""
REDACTED = "***"


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run that a tracker gets."""

    run_id: str
    folder: Path
    """The run's folder. A tracker may keep files in a subfolder."""
    name: str
    """Name of the run that the tracker shows."""
    project: str
    config: Mapping[str, Any]
    """The run's configuration by section, without secrets."""
    code: Mapping[str, Any]
    """Versions of relaxd and Python, and the commit of the code."""
    settings: Mapping[str, Any]
    """The section [tracking] of the configuration."""


@dataclass(frozen=True)
class Edition:
    """A tracker's copy of a run, from the first step on.

    When logged steps are trained again with other numbers, as after a loss of Redis, another edition begins. It gets
    all steps and replaces the earlier edition, so that no curve forks.
    """

    id: str
    """Unique id of the edition: letters and digits."""
    replaced: str
    """Id of the edition that this edition replaces, or ""."""
    resumed: bool
    """True if the edition was started before, and already has steps."""


class Tracker:
    """Shows a run's numbers and samples outside of relaxd. All methods of one tracker are called from one thread, and
    may block and raise.

    After an error the tracker is closed, and another instance is started a little later. Steps logged since the last
    `flush` are then logged again, and must replace their earlier numbers.
    """

    def begins_anew(self, run: TrackedRun) -> bool:
        """Return True if each start of the tracker begins a new edition."""
        return False

    def start(self, run: TrackedRun, edition: Edition) -> None:
        """Start logging a run: all steps of a new edition, or the missing steps of a resumed one."""
        raise NotImplementedError

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step, such as "train/reward". Steps come in order."""
        raise NotImplementedError

    def log_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of an evaluation of a step's weights, such as "eval/reward".

        Later steps may be logged before it.
        """
        self.log_step(step, numbers)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log trained samples of a step. The default does nothing."""

    def flush(self) -> None:
        """Wait until everything logged so far is stored."""

    def close(self, *, ended: bool) -> None:
        """Release the tracker's resources. `ended` is True if the run has ended."""


TRACKERS = {
    "tensorboard": "relaxd.trackers.tensorboard_tracker:TensorBoardTracker",
    "wandb": "relaxd.trackers.wandb_tracker:WandbTracker",
    "mlflow": "relaxd.trackers.mlflow_tracker:MLflowTracker",
    "clearml": "relaxd.trackers.clearml_tracker:ClearMLTracker",
    "trackio": "relaxd.trackers.trackio_tracker:TrackioTracker",
}
"""Import paths of the bundled trackers' classes by name; each module imports the tracker's package."""


def load_tracker(name: str) -> Tracker:
    """Return a new tracker of the class that a configuration names. Raises ImportProblem if it can't be imported."""
    try:
        found: Tracker = import_own(TRACKERS.get(name, name))()
    except ImportProblem as error:
        if name not in TRACKERS:
            raise
        package = "trackio" if name == "trackio" else "relaxd[trackers]"
        raise ImportProblem(
            f'{error.__cause__ or error}: "pip install {package}", or set tracking.python to an interpreter that has it'
        ) from error
    if missing := [method for method in ("start", "log_step") if not callable(getattr(found, method, None))]:
        raise ImportProblem(f"{name} has no {missing[0]}: derive it from relaxd.trackers.Tracker")
    return found


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the column names of samples, which are the first row's keys, and the cells of each row."""
    names = list(rows[0])
    return names, [[row.get(name) for name in names] for row in rows]


def redact(value: Any, name: str = "") -> Any:
    """Return a configuration without its secrets: values under a secret's name, and passwords in addresses."""
    if isinstance(value, Mapping):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, name) for inner in value]
    if isinstance(value, str) and value:
        if SECRET.search(name) and not VARIABLE.search(name):
            return REDACTED
        if "://" in value and "@" in value:
            return _without_password(value)
    return value


def _without_password(address: str) -> str:
    try:
        netloc = urlsplit(address).netloc
    except ValueError:  # no address after all
        return address
    _, at, host = netloc.rpartition("@")
    return address.replace(netloc, f"{REDACTED}@{host}", 1) if at else address


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping, with names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
