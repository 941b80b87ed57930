"""Users' own numbers: `log_metric` logs them within a reward.

They are sent as parts of the reward, named `log/<how>/<name>`, and appear in the step's record as `user/<name>`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from numbers import Real
from typing import Literal

import numpy as np

How = Literal["mean", "sum", "min", "max", "last"]
AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "sum": math.fsum,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
}
"""Functions that reduce the numbers logged under a name to one, per sample and then per step; keys: values of `how`."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-/]{0,63}")
MAX_NAMES = 64
"""Maximum number of names that one call of a reward may log."""
MAX_STEP_NAMES = 256
"""Maximum number of names of logged numbers in the record of a step."""
PART = re.compile(r"log/([a-z]+)/(.+)")

Logged = dict[str, tuple[How, list[float]]]
"""Numbers that a reward logged, by name: (how to reduce them to one number, the numbers)."""
_collecting: ContextVar[Logged | None] = ContextVar("relaxd_logged", default=None)


def log_metric(name: str, value: float, how: How = "mean") -> None:
    """Add a number of your own to the record of the step that trains this sample, as `user/<name>`.

    Call it within a reward: in its function, functions called by it, its coroutines, and `asyncio.to_thread`.
    Elsewhere, as in a test of the reward, it only checks the arguments.

    Args:
        name: letters, digits and _.-/, a letter first, at most 64 characters. At most 64 names in a call of a reward,
            and 256 in a step.
        value: a finite number.
        how: how to reduce a step's values to one: their mean over samples, sum, min, max, or the last value.

    Raises:
        ValueError: an argument is invalid, or `how` differs from an earlier call with this name. It fails the sample.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"log_metric: the name is {name!r}: it must have 1 to 64 letters, digits, _, ., - and /, a letter first"
        )
    if how not in AGGREGATES:
        raise ValueError(f"log_metric: how is {how!r} for {name!r}: it must be one of {', '.join(AGGREGATES)}")
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(number, Real) or not math.isfinite(number):
        raise ValueError(f"log_metric: the value of {name!r} is {value!r}: it must be a finite number")
    logged = _collecting.get(None)
    if logged is None:
        return
    if name not in logged and len(logged) == MAX_NAMES:
        raise ValueError(f"log_metric: {name!r} is one name more than the {MAX_NAMES} that a call of a reward may log")
    before, values = logged.setdefault(name, (how, []))
    if before != how:
        raise ValueError(f"log_metric: how is {how!r} for {name!r}, but was {before!r}: it must be the same each time")
    values.append(float(number))


def collect_into(logged: Logged) -> None:
    """Make later `log_metric` calls in this context (contextvars) store their numbers in `logged`."""
    _collecting.set(logged)


def logged_parts(logged: Logged) -> dict[str, float]:
    """Convert numbers that a reward logged to parts of the reward, named `log/<how>/<name>`."""
    return {f"log/{how}/{name}": AGGREGATES[how](values) for name, (how, values) in logged.items()}


def is_logged(part: str) -> bool:
    """Return True if a part of a reward, by its name, is a number that the reward logged with `log_metric`."""
    return PART.match(part) is not None


def part_metrics(parts: Mapping[str, Sequence[float]], prefix: str = "") -> dict[str, float]:
    """Return the metrics of a reward's parts, given the values of all samples that have them.

    A part's metric is its mean, named `<prefix><part>`. A user's own number is named `user/<name>`;
    `user_names_left_out` counts names beyond MAX_STEP_NAMES.
    """
    metrics: dict[str, float] = {}
    own: dict[str, float] = {}
    for part, values in parts.items():
        if not values:
            continue
        match = PART.fullmatch(part)
        if match is not None and match[1] in AGGREGATES:
            own[f"user/{match[2]}"] = AGGREGATES[match[1]](values)
        else:
            metrics[f"{prefix}{part}"] = float(np.mean(values))
    shown = sorted(own)[:MAX_STEP_NAMES]
    metrics |= {name: own[name] for name in shown}
    return metrics | ({"user_names_left_out": float(len(own) - len(shown))} if len(own) > len(shown) else {})
