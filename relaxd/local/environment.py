"""The environment of the processes that the command line starts."""

import os
from pathlib import Path

import relaxd


def python_path() -> str:
    """A PYTHONPATH with which child processes find relaxd and the services, installed or in a source tree."""
    source = str(Path(relaxd.__file__).parents[1])
    return os.pathsep.join(path for path in (source, os.environ.get("PYTHONPATH", "")) if path)
