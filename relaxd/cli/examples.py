"""Paths of the example configurations, in a source tree or installed."""

import sysconfig
from pathlib import Path

import relaxd
from relaxd.client.errors import CliError


def example(name: str) -> Path:
    """Return the path of an example, such as "addition.toml". Raises CliError when it isn't installed."""
    source = Path(relaxd.__file__).parents[1] / "examples" / name
    installed = Path(sysconfig.get_path("data")) / "share" / "relaxd" / "examples" / name
    for path in (source, installed):
        if path.is_file():
            return path
    raise CliError(f"the example {name} is missing from {source} and {installed}", "install relaxd again")
