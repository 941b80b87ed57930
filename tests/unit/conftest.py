"""Settings of the unit tests."""

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does. The test's own timeout ends what hangs.
settings.register_profile("relaxd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("relaxd")
