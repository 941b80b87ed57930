"""`relaxd doctor`: checks of this machine and of its running services. Each is a function of `checks.CHECKS`.

This file has the subjects of the checks, and their findings.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relaxd.config import RunConfig
from relaxd.local.stack import COORDINATOR_PORT
from relaxd.local.state_folder import StateFolder

Level = Literal["ok", "absent", "warning", "problem"]
"""ok: as it should be. absent: not there, and not needed here. warning: it may slow a run down or stop it later.
problem: something that relaxd needs will not work."""


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    level: Level
    about: str
    """Name of the subject, such as "open files"."""
    found: str
    right: str = ""
    """The right state, with the reason; empty if all is well."""
    how: str = ""
    """Way to the right state, by a command if possible; empty if `right` says it."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Subjects of the checks."""

    folder: StateFolder
    """State folder of the services that are up, or would be started."""
    config: RunConfig | None = None
    """The run to check for, if any."""
    coordinator: str | None = None
    """Address of the coordinator that commands call here; None: no services are up."""
    containers: bool = False
    """True if the services run in containers of this machine, or are about to."""
    elsewhere: bool = False
    """True if the services run in containers or on other machines, so that they don't need this environment's
    packages."""
    port: int = COORDINATOR_PORT
    """The coordinator's default port."""
    patience_seconds: float = 2.0
    """Maximum seconds to wait for another process's answer."""

    @property
    def runs(self) -> Path:
        """Folder that contains the runs' folders."""
        return (self.config.run.folder if self.config else Path("runs")).expanduser()
