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
"""Severity of a check's finding. ok: nothing is wrong. absent: something is missing that isn't needed here. warning: it
may slow a run down or stop it later. problem: something that relaxd needs will not work."""


@dataclass(frozen=True)
class Finding:
    """Finding of a doctor's check: its subject, severity and remedy."""

    level: Level
    about: str
    """Subject of the check, such as "open files"."""
    found: str
    right: str = ""
    """The state that is required instead, with the reason; empty if nothing is wrong."""
    how: str = ""
    """Steps to the required state, as a command if possible; empty if `right` says it."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Scope of the doctor's checks: a state folder, a run's configuration, running services."""

    folder: StateFolder
    """State folder of the stack whose services are running, or would be started."""
    config: RunConfig | None = None
    """Configuration of the run for which the machine is checked; None: no particular run."""
    coordinator: str | None = None
    """Address of the coordinator that commands call by default; None: no services are running."""
    containers: bool = False
    """True if the services run in containers on this machine, or are about to be started there."""
    elsewhere: bool = False
    """True if the services run in containers or on other machines, so that they don't need this environment's
    packages."""
    port: int = COORDINATOR_PORT
    """Port on which the coordinator listens by default, which the doctor checks."""
    patience_seconds: float = 2.0
    """Maximum seconds that a check waits for an answer from Redis or another process."""

    @property
    def runs(self) -> Path:
        """Path of the folder that contains the folders of runs."""
        return (self.config.run.folder if self.config else Path("runs")).expanduser()
