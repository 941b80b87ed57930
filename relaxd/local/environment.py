"""Environment of the processes that the command line starts."""

import os
from pathlib import Path

import relaxd


def python_path() -> str:
    """Return a PYTHONPATH with which child processes find relaxd and the services."""
    source = str(Path(relaxd.__file__).parents[1])
    return os.pathsep.join(path for path in (source, os.environ.get("PYTHONPATH", "")) if path)
