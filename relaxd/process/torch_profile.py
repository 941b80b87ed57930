"""Recording with torch's profiler, into a file that opens in Perfetto or chrome://tracing.

Imports torch, so only processes that hold a model import this.
"""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity


class TraceRecorder:
    """Records what this thread runs, and the GPU for it, from its creation to `write`."""

    def __init__(self, *, stacks: bool) -> None:
        """Begin. `stacks` records the lines of Python that call each operation.

        Raises RuntimeError: this process is being recorded already.
        """
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, with_stack=stacks)
        self._profiler.start()

    def write(self, path: Path) -> None:
        """End, and write the file whole, compressed by gzip. Raises OSError."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the GPU still works on is of these steps, too
        self._profiler.stop()
        partial = path.with_name(f"partial-{path.name}")  # torch compresses by the name's end
        path.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(partial))
        os.replace(partial, path)
