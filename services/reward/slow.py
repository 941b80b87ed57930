"""The limit from which a sample is slow, on which the pool and its workers must agree."""

SLOW_SECONDS = 5.0
"""A sample that takes this long, or half its deadline if that is shorter, is reported while it runs."""


def slow_after(deadline_seconds: float) -> float:
    """Return the seconds after which a sample with this deadline is slow."""
    return max(0.01, min(SLOW_SECONDS, deadline_seconds / 2))
