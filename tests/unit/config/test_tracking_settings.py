"""The section [tracking]: what is wrong is refused with the setting, its value and what would be right."""

import pytest
from pydantic import ValidationError

from relaxd.config.operation import TrackingConfig
from tests.kit.cases import each

WRONG = [
    ({"trackers": ["wandbb"]}, "tracking.trackers.0 = \"wandbb\": did you mean 'wandb'?"),
    ({"trackers": ["x"]}, "there are tensorboard, wandb, mlflow, clearml, trackio."),
    ({"trackers": ["wandb", "wandb"]}, 'tracking.trackers.1 = "wandb": it is listed twice'),
    ({"project": "p"}, 'tracking.project is "p", but tracking.trackers is empty: name a tracker'),
    (
        {"trackers": ["tensorboard"], "wandb_mode": "offline"},
        'tracking.wandb_mode is "offline", but tracking.trackers has no "wandb": add it',
    ),
    (
        {"trackers": ["wandb"], "clearml_mode": "offline"},
        'tracking.clearml_mode is "offline", but tracking.trackers has no "clearml": add it',
    ),
    ({"trackers": ["tensorboard"], "options": {"a": 1}}, 'tracking.options is {"a": 1}, but tracking.trackers has no'),
    ({"trackers": ["mlflow"]}, 'tracking.mlflow_url is "": set the address of an MLflow server'),
    ({"trackers": ["mlflow"], "mlflow_url": "host:5000"}, 'tracking.mlflow_url is "host:5000": set the address'),
    ({"trackers": ["mlflow"], "mlflow_url": "http://me:secret@host"}, "MLFLOW_TRACKING_USERNAME"),
]


@each(("given", "text"), WRONG)
def test_wrong_settings_are_refused(given: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrackingConfig(**given)
    message = caught.value.errors()[0]["msg"]
    assert text in message
    assert "secret" not in message


def test_trackers_go_together() -> None:
    trackers = ("tensorboard", "wandb", "mlflow", "own.py:Own", "package.module:Own")
    config = TrackingConfig(trackers=trackers, mlflow_url="https://host:5000/mlflow", options={"a": 1})
    assert config.trackers == trackers
