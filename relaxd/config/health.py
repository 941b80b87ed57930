"""Settings of health checks and restarts."""

from pydantic import Field

from relaxd.config.base import Section


class HealthConfig(Section):
    """Detection and recovery of dead or stuck replicas (docs/reliability.md).

    First, the replica is restarted in place. If that does not help, the run is paused and all replicas of the role are
    restarted (a rebuild). After that, the run fails.
    """

    stuck_seconds: float = Field(default=300.0, gt=0)
    """A replica that holds groups but makes no progress for this long is stuck. Its own deadlines are added
    (reward.timeout_seconds and roles.judge.timeout_seconds, trainer.collective_timeout_seconds,
    weights.timeout_seconds)."""
    start_seconds: float = Field(default=900.0, gt=0)
    """A replica that starts without progress for this long is stuck. Reading its model is progress."""
    failed_seconds: float = Field(default=60.0, gt=0)
    """A failed replica may recover by itself for this long before it is restarted."""
    max_sync_failures: int = Field(default=4, ge=1)
    """Consecutive failed weight synchronisations before an engine is restarted."""
    restart_timeout_seconds: float = Field(default=30.0, gt=0)
    """Time for a replica to register again after its death or restart. Then its launcher restarts it, with twice the
    time, and so on up to role_timeout_seconds."""
    max_restarts: int = Field(default=3, ge=1)
    """Maximum restarts of a replica within restart_window_seconds, and maximum consecutive attempts to restart it."""
    restart_window_seconds: float = Field(default=600.0, gt=0)
    """Window of max_restarts. A replica that exceeded it is restarted once more after this long."""
    first_backoff_seconds: float = Field(default=1.0, ge=0)
    """Pause before a replica's second restart within the window, and between two rebuilds of a role; doubles each
    time."""
    role_timeout_seconds: float = Field(default=300.0, gt=0)
    """A role without replicas for this long is rebuilt, as is one whose replicas all exceeded max_restarts."""
    max_rebuilds: int = Field(default=2, ge=0)
    """Rebuilds of a role without a committed step in between, before the run fails."""
