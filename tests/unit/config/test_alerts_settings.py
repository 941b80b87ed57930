"""The section [alerts]: what is wrong is refused with the setting, its value and what would be right."""

import pytest
from pydantic import ValidationError

from relaxd.config.operation import AlertsConfig
from tests.kit.cases import each

WRONG = [
    ({"rules": ["kl > 1", "kl ="]}, 'alerts.rules.1 = "kl =": expected "METRIC < NUMBER"'),
    ({"rules": ["kl > 1", "kl > 1"]}, 'alerts.rules.1 = "kl > 1": it is listed twice'),
    ({"quiet_hours": "22-7"}, 'alerts.quiet_hours = "22-7": expected two times of the day that differ'),
    ({"quiet_hours": "24:00-07:00"}, "expected two times of the day"),
    ({"quiet_hours": "07:00-07:00"}, "expected two times of the day that differ"),
    ({"time_zone": "Mars"}, 'alerts.time_zone = "Mars": it must be a name such as "Europe/Berlin"'),
    ({"time_zone": "../etc"}, "it must be a name"),
    ({"urls_file": "slack://secret"}, "alerts.urls_file is an address, which would be kept with the run"),
]


@each(("given", "text"), WRONG)
def test_wrong_settings_are_refused(given: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AlertsConfig(**given)
    message = caught.value.errors()[0]["msg"]
    assert text in message
    assert "secret" not in message


def test_good_settings() -> None:
    config = AlertsConfig(quiet_hours="22:00-07:00", time_zone="Europe/Berlin", rules=("kl > 0.2",))
    assert config.rules == ("kl > 0.2",)
