"""Metrics of a run's steps, read from metrics.jsonl with bounded memory for any number of steps.

The file has a line for each step, in order: the first requested one is found by bisection, and only displayed lines are
parsed. The metrics of other lines are found by searching the bytes for quoted names.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from relaxd.run_folder import METRICS, parse_line
from relaxd.v1 import coordinator_pb2 as pb

MAX_POINTS = 10_000
"""Maximum number of points of the series of one metric."""
DEFAULT_POINTS = 1000
MAX_VALUES = 200_000
"""Maximum number of points of all series together that a request names, about 3 MB on the wire."""
POINTS_OF_ALL = 500
"""Maximum number of points of each series if a request names no metrics and so gets the series of all."""
STEP = re.compile(rb'\{"step": (\d+)[,}]')
EVALUATION = "eval"
"""Prefix of the names of evaluation metrics, which only some lines of metrics.jsonl have."""


class _EvenlyChosen:
    """Chooses at most `limit` of a file's lines at even distances, including the first and the last line."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stride = 1
        self._count = 0
        self._last = 0
        self._chosen: list[int] = []

    def add(self, place: int) -> None:
        """Add a line by its byte offset in the file. Call this in ascending order of offsets."""
        if self._count % self._stride == 0:
            self._chosen.append(place)
            if len(self._chosen) > self._limit:
                del self._chosen[1::2]
                self._stride *= 2
        self._count += 1
        self._last = place

    @property
    def places(self) -> set[int]:
        """Byte offsets of the chosen lines."""
        if not self._count:
            return set()
        full = len(self._chosen) == self._limit
        return {*(self._chosen[:-1] if full else self._chosen), self._last}


def read_series(folder: Path, request: pb.GetMetricsRequest) -> list[pb.MetricSeries]:
    """Return the series of the metrics that a request names, or of all if it names none, sorted by name.

    Returns no series if the run has no metrics yet. Ignores the request's `run_id`.
    """
    points = min(request.max_points or DEFAULT_POINTS, MAX_POINTS)
    names = sorted(set(request.names))
    points = min(points, MAX_VALUES // len(names)) if names else min(points, POINTS_OF_ALL)
    # Without names, the lines with an evaluation are chosen separately from all lines.
    needles = {name: json.dumps(name).encode() + b":" for name in names} or {"": b"", EVALUATION: b'"eval'}
    chosen = {key: _EvenlyChosen(points) for key in needles}
    try:
        with (folder / METRICS).open("rb") as file:
            for place, line in _lines(file, request.first_step, request.last_step):
                for key, needle in needles.items():
                    if needle in line:
                        chosen[key].add(place)
            places = {key: one.places for key, one in chosen.items()}
            lines = dict(_parsed(file, sorted(set().union(*places.values()))))
    except FileNotFoundError:
        return []
    found: dict[str, pb.MetricSeries] = {}
    for place, values in lines.items():
        for name in names or values:
            key = name if names else EVALUATION if name.startswith(EVALUATION) else ""
            value = values.get(name)
            if place in places[key] and name != "step" and isinstance(value, int | float):
                one = found.setdefault(name, pb.MetricSeries(name=name))
                one.steps.append(values["step"])
                one.values.append(value)
    return [found[name] for name in sorted(found)]


def rows(series: Iterable[pb.MetricSeries]) -> list[dict[str, Any]]:
    """Convert series of metrics to rows in the order of steps: `step`, and the metrics' values at that step."""
    by_step: dict[int, dict[str, Any]] = {}
    for one in series:
        for step, value in zip(one.steps, one.values, strict=True):
            by_step.setdefault(step, {"step": step})[one.name] = value
    return [by_step[step] for step in sorted(by_step)]


def _lines(file: BinaryIO, first_step: int, last_step: int) -> Iterator[tuple[int, bytes]]:
    """Yield byte offset and text of each line of metrics.jsonl from `first_step` to `last_step` (0: the end)."""
    place = _place_of(file, first_step)
    file.seek(place)
    for line in file:
        step = _step_of(line)
        if last_step and step > last_step:
            return
        if step >= first_step:
            yield place, line
        place += len(line)


def _place_of(file: BinaryIO, step: int) -> int:
    """Return the byte offset in metrics.jsonl of the first line whose step is `step` or later."""
    low, high = 0, file.seek(0, 2)  # every line that begins before `low` is of an earlier step
    while low < high:
        middle = (low + high) // 2
        file.seek(middle)
        if middle > low:
            file.readline()
        place = file.tell()
        line = file.readline()
        if line and _step_of(line) < step:
            low = place + len(line)
        else:
            high = middle
    return low


def _step_of(line: bytes) -> int:
    """Return the step of a line of metrics.jsonl; -1 for an incomplete line."""
    match = STEP.match(line)
    return int(match[1]) if match else -1


def _parsed(file: BinaryIO, places: Iterable[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for place in places:
        file.seek(place)
        if (values := parse_line(file.readline())) is not None:
            yield place, values
