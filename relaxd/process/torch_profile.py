"""Records with torch's profiler, into a file that opens in Perfetto or chrome://tracing.

Imports torch, so only processes that hold a model import this.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

logger = logging.getLogger(__name__)


class TraceRecorder:
    """Records, with torch's profiler, this thread's work and the GPU work that it starts, from creation to `write`."""

    def __init__(self, *, stacks: bool) -> None:
        """Start recording. With `stacks`, the Python stack of each operation is recorded, too.

        Raises RuntimeError if this process is already being recorded.
        """
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, with_stack=stacks)
        self._profiler.start()

    def write(self, path: Path) -> None:
        """Stop recording, and write the profile to `path`, gzipped: the whole file or none. Raises OSError."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # work still running on the GPU belongs to these steps, too
        self._profiler.stop()
        partial = path.with_name(f"partial-{path.name}")  # torch compresses if the name ends in .gz
        path.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(partial))
        os.replace(partial, path)


class StepRecording:
    """Records some steps of a loop with torch's profiler, in the loop's thread."""

    def __init__(self, path: Path, steps: int, *, stacks: bool) -> None:
        """Prepare to record `steps` steps to the file `path`. The next call of `at_step` starts the recording."""
        self._path = path
        self._left = steps
        self._stacks = stacks
        self._recorder: TraceRecorder | None = None

    @property
    def ended(self) -> bool:
        """True if the recording's file was written, or writing it failed."""
        return self._left < 0

    def at_step(self) -> None:
        """Note that a step of the loop begins. The first call starts the recording; the call after the last recorded
        step writes the file."""
        if self.ended:
            return
        if self._recorder is None:
            self._recorder = TraceRecorder(stacks=self._stacks)
        elif self._left == 0:
            write_or_log(self._recorder.write, self._path)
        self._left -= 1


def write_or_log(write: Callable[[Path], None], path: Path) -> None:
    """Write a profile to a file. A disk error is only logged, because a profile must not fail the recorded work."""
    try:
        write(path)
        logger.info("wrote %s", path)
    except OSError as error:
        logger.warning("%s is not written: %s", path, error)
