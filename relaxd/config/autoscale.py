"""Settings of the autoscaler."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from relaxd.config.section import Section


class AutoscaleConfig(Section):
    """The autoscaler of rollout replicas (docs/scaling.md)."""

    mode: Literal["off", "dry_run", "on"] = "off"
    """"on": the coordinator adds rollout replicas while the trainer waits for engines that are busy, and removes them
    while they are idle. "dry_run": it only says what it would do. `relaxd autoscale` changes it during the run."""
    min_replicas: PositiveInt = 1
    """Minimum number of rollout replicas. Only replicas that were scaled out are ever removed."""
    max_replicas: PositiveInt = 8
    """Maximum number of rollout replicas."""
    out_seconds: float = Field(default=30.0, ge=1, le=3600)
    """Seconds for which a reason to add replicas must have lasted."""
    in_seconds: float = Field(default=120.0, ge=1, le=3600)
    """Seconds for which a reason to remove a replica must have lasted."""
    out_cooldown_seconds: float = Field(default=60.0, ge=0)
    """Seconds after an addition of replicas in which none are added."""
    in_cooldown_seconds: float = Field(default=300.0, ge=0)
    """Seconds after an addition or removal of replicas in which none are removed."""

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"autoscale.min_replicas is {self.min_replicas}, but autoscale.max_replicas is {self.max_replicas}: "
                "it must be at least as large"
            )
        return self
