"""Settings of trackers, such as TensorBoard and W&B."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from relaxd.config.section import Section
from relaxd.importing import check_known_or_own

TRACKERS = ("tensorboard", "wandb", "mlflow", "clearml", "trackio")
"""The bundled trackers."""


class TrackingConfig(Section):
    """Trackers, which show a run's numbers outside of relaxd (docs/tracking.md)."""

    section: ClassVar[str] = "tracking"

    trackers: tuple[str, ...] = ()
    """Trackers that get the numbers of each step: "tensorboard", "wandb", "mlflow", "clearml", "trackio", or one of
    your own as "package.module:Class" or "file.py:Class"."""
    python: str = ""
    """Python interpreter that has the trackers' packages, if it isn't that of the coordinator. It needs Python 3.11 and
    nothing of relaxd."""
    project: str = "relaxd"
    """Name of the run's project in W&B, ClearML and Trackio, or of its experiment in MLflow."""
    name: str = ""
    """Name of the run in W&B, MLflow, ClearML and Trackio. By default the run's id."""
    samples: bool = True
    """Also show the samples that the run keeps (telemetry.samples_per_step)."""
    wandb_mode: Literal["online", "offline"] = "online"
    """online: send to W&B, with the key WANDB_API_KEY of the coordinator's environment. offline: write files into the
    run's folder, which `wandb sync` sends later."""
    wandb_entity: str = ""
    """User or team of W&B. By default that of the key."""
    mlflow_url: str = ""
    """Address of the MLflow server, such as "http://mlflow:5000". Its secrets are in the coordinator's environment:
    MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    clearml_mode: Literal["online", "offline"] = "online"
    """online: send to the ClearML server that clearml.conf or CLEARML_API_HOST, CLEARML_API_ACCESS_KEY and
    CLEARML_API_SECRET_KEY of the coordinator's environment name. offline: write files into the run's folder, which
    `Task.import_offline_session` sends later."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings for trackers of your own. relaxd passes them on unread."""

    def problems(self) -> Iterator[str]:
        for number, name in enumerate(self.trackers):
            there_are, own = "there are", "A tracker of your own"
            check_known_or_own(f"tracking.trackers.{number}", name, TRACKERS, there_are, own)
            if name in self.trackers[:number]:
                yield f'tracking.trackers.{number} = "{name}": it is listed twice: remove one'
        if not self.trackers:
            others = [name for name in type(self).model_fields if name != "trackers"]
            yield from self.unused(others, "tracking.trackers is empty: name a tracker")
        needs = {
            "wandb": ("wandb_mode", "wandb_entity"),
            "mlflow": ("mlflow_url",),
            "clearml": ("clearml_mode",),
        }
        for tracker, names in needs.items():
            if tracker not in self.trackers:
                yield from self.unused(names, f'tracking.trackers has no "{tracker}": add it')
        if not set(self.trackers) - set(TRACKERS):
            yield from self.unused(("options",), "tracking.trackers has no tracker of your own: name it")
        if "mlflow" not in self.trackers:
            return
        url = urlsplit(self.mlflow_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            yield (
                f'tracking.mlflow_url is "{self.mlflow_url}": set the address of an MLflow server, such as '
                '"http://mlflow:5000"'
            )
        if "@" in url.netloc:
            yield (
                "tracking.mlflow_url has a password or token, which would be kept with the run: set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the coordinator's environment instead"
            )
