"""Settings of alarms and notifications."""

from collections.abc import Iterator
from zoneinfo import ZoneInfo

from pydantic import Field

from relaxd.alerts.notifications import parse_quiet_hours
from relaxd.alerts.rules import parse_rule
from relaxd.config.section import Section

RULES = (
    "reward_mean < 0.5 x highest over 20 steps",
    "entropy < 0.1 x highest over 20 steps",
    "tokens_per_second < 0.5 x highest over 20 steps",
)
"""Rules of a run without rules in its configuration. A healthy run of any task stays far from their limits."""


class AlertsConfig(Section):
    """Alarms, and notifications of them (docs/alerts.md). The addresses to notify are secrets, not settings."""

    rules: tuple[str, ...] = RULES
    """Rules on metrics, each an alarm while it holds: "METRIC < NUMBER" or "METRIC > NUMBER", also "< 0.5 x highest",
    "> 2 x lowest" and "over N steps", whose median is compared (5 by default)."""
    wait_seconds: float = Field(default=900.0, ge=1)
    """Seconds after which a wait, such as for Redis or a missing replica, raises an alarm."""
    min_free_gb: float = Field(default=5.0, ge=0)
    """Free space on the disk of the run's folder below which an alarm is raised, in GB. 0: no alarm."""
    urls_file: str = ""
    """File on the coordinator's machine with the addresses to notify, one Apprise URL in a line. By default those in
    RELAXD_ALERT_URLS of the coordinator's environment."""
    quiet_hours: str = ""
    """Daily hours in which notifications wait, such as "22:00-07:00". The end of the run doesn't wait."""
    time_zone: str = ""
    """Time zone of the quiet hours, such as "Europe/Berlin". By default that of the coordinator's machine."""
    repeat_seconds: float = Field(default=3600.0, ge=0)
    """Minimum seconds between notifications that the same alarm began; if it begins again sooner, neither that nor its
    end is notified."""

    def problems(self) -> Iterator[str]:
        for number, rule in enumerate(self.rules):
            try:
                parse_rule(rule)
            except ValueError as error:
                yield f'alerts.rules.{number} = "{rule}": {error}'
            if rule in self.rules[:number]:
                yield f'alerts.rules.{number} = "{rule}": it is listed twice: remove one'
        try:
            parse_quiet_hours(self.quiet_hours)
        except ValueError as error:
            yield f'alerts.quiet_hours = "{self.quiet_hours}": {error}'
        try:
            if self.time_zone:  # a machine without the database of time zones needs none of them
                ZoneInfo(self.time_zone)
        except (ValueError, OSError, LookupError):
            yield f'alerts.time_zone = "{self.time_zone}": it must be a name such as "Europe/Berlin"'
        if "://" in self.urls_file:
            yield (
                "alerts.urls_file is an address, which would be kept with the run: write it into a file, and name that"
            )
