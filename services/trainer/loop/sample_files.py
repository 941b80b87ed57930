"""Files with all samples of a step (telemetry.all_samples), written beside training."""

import gzip
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from relaxd.run_folder import all_samples_file
from relaxd.waiting import waiting

logger = logging.getLogger(__name__)

LEVEL = 1
"""Compression level of zlib, which leaves the interpreter to training meanwhile."""
PATIENCE_SECONDS = 10.0
"""Seconds for which a step waits for the files of the step before."""
LINES_TOGETHER = 64
"""Number of lines to compress in one call."""


class SampleFiles:
    """Writes a file for each step in a thread, and removes old ones.

    A step that is trained again replaces its file. A disk that refuses files or is slow costs samples, but no step; a
    warning says so. A trainer that is killed right after a commit may leave that step without a file.
    """

    def __init__(self, folder: Path, kept_steps: int) -> None:
        """`folder`: the run's; `kept_steps`: number of newest steps whose files are kept, 0 for all."""
        self._folder = folder
        self._kept_steps = kept_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None
        self._refused = False

    def write(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Start writing the samples of a step. They are dropped if the previous step's files take too long."""
        if self.await_written():
            self._writing = self._thread.submit(self._write, step, samples)
        else:
            logger.warning(
                "the samples of step %d are not kept: those of an earlier step are still being written", step
            )

    def await_written(self, seconds: float | None = None) -> bool:
        """Return whether all files are written, after waiting for them (PATIENCE_SECONDS by default)."""
        if self._writing is not None:
            with waiting("the samples of the step before, to be written", disk=True):
                wait([self._writing], PATIENCE_SECONDS if seconds is None else seconds)
            if not self._writing.done():
                return False
            self._writing.result(0)  # raises what nobody foresaw
            self._writing = None
        return True

    def _write(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        path = all_samples_file(self._folder, step)
        partial = path.with_name(f"{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.GzipFile(partial, "wb", LEVEL, mtime=0) as file:
                for begin in range(0, len(samples), LINES_TOGETHER):
                    lines = (json.dumps(one, ensure_ascii=False) for one in samples[begin : begin + LINES_TOGETHER])
                    file.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
            os.replace(partial, path)
            if self._kept_steps and step > self._kept_steps:
                all_samples_file(self._folder, step - self._kept_steps).unlink(missing_ok=True)
        except OSError as error:
            if not self._refused:
                logger.warning("the samples of step %d are not kept: %s", step, error)
            self._refused = True
            return
        self._refused = False
