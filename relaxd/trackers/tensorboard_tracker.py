"""TensorBoard event files in the run's folder tensorboard/."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.text import metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from relaxd.trackers.tracker import Edition, TrackedRun, Tracker, table_of

FOLDER = "tensorboard"
"""Folder of the event files in the run's folder. `tensorboard --logdir runs` shows all runs."""


class TensorBoardTracker(Tracker):
    """Writes event files: numbers as scalars, configuration and samples as texts."""

    def start(self, run: TrackedRun, edition: Edition) -> None:
        folder = run.folder / FOLDER
        _await_later_name(folder.glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(folder))
        self._resumed = edition.resumed
        if edition.resumed:
            return
        self._forget_from(0)  # earlier files stay: a TensorBoard that reads one of them would not go on after it
        for name, values in (("config", run.config), ("code", run.code)):
            self._add_text(0, name, f"```json\n{json.dumps(values, indent=2)}\n```")

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._resumed:  # steps that were written when the process was killed are not known to be logged
            self._forget_from(step)
            self._resumed = False
        self.log_evaluation(step, numbers)

    def log_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step, summary=summary_pb2.Summary(value=values))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._add_text(step, "samples", markdown_table(rows))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, ended: bool) -> None:
        self._writer.close()

    def _forget_from(self, step: int) -> None:
        """Write an event that makes readers drop the numbers of this step and of later steps."""
        self._add(step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, **what))

    def _add_text(self, step: int, tag: str, text: str) -> None:
        one = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=one, string_val=[text.encode()])
        about = metadata.create_summary_metadata(display_name=tag, description="")
        value = summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=about)
        self._add(step, summary=summary_pb2.Summary(value=[value]))


def _await_later_name(earlier: Iterable[Path]) -> None:
    """Wait until a new event file's name, which contains the current second, sorts after the names of earlier files."""
    latest = max((int(path.name.split(".")[3]) for path in earlier), default=0)
    time.sleep(max(0.0, min(latest + 1 - time.time(), 2.0)))


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table. The first row's keys are the column titles."""
    names, rows_of_cells = table_of(rows)
    lines = [names, ["---"] * len(names), *(list(map(_cell, cells)) for cells in rows_of_cells)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
    for mark, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(mark, instead)
    return text
