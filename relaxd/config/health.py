"""When the coordinator restarts replicas, and when it gives up."""

from pydantic import Field

from relaxd.config.base import Section


class HealthConfig(Section):
    """Noticing replicas that are dead or stuck, and bringing them back (docs/reliability.md).

    First tier: the replica is restarted in place. Second tier: the run is paused and every replica of the role is
    restarted. Then the run fails.
    """

    stuck_seconds: float = Field(default=300.0, gt=0)
    """A replica is stuck that holds groups and gets nothing done for this long, on top of the deadlines that it keeps
    by itself (reward.timeout_seconds, trainer.collective_timeout_seconds, weights.timeout_seconds)."""
    start_seconds: float = Field(default=900.0, gt=0)
    """A replica is stuck that has been starting for this long without saying anything new, or reading any more of its
    model."""
    failed_seconds: float = Field(default=60.0, gt=0)
    """A replica that has failed tries again by itself; for this long before it is restarted."""
    max_sync_failures: int = Field(default=4, ge=1)
    """Weight synchronisations in a row that an engine may fail before it is restarted."""
    restart_timeout_seconds: float = Field(default=30.0, gt=0)
    """A replica that died or was restarted has to register again within this; else its launcher starts it again, and it
    has twice as long, and so on up to role_timeout_seconds."""
    max_restarts: int = Field(default=3, ge=1)
    """Most restarts of a replica within restart_window_seconds, and most tries in a row to bring it back before it is
    given up."""
    restart_window_seconds: float = Field(default=600.0, gt=0)
    """The window of max_restarts. A replica that was given up is tried once more after this long."""
    first_backoff_seconds: float = Field(default=1.0, ge=0)
    """Pause before a replica's second restart within the window, and between two rebuilds of a role; doubles with each
    further one."""
    role_timeout_seconds: float = Field(default=300.0, gt=0)
    """A role of which no replica has been there for this long is rebuilt, as is one whose replicas are all given up."""
    max_rebuilds: int = Field(default=2, ge=0)
    """Rebuilds of a role, without a step committed in between, before the run fails."""
