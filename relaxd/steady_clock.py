"""A clock for comparing times: unlike the system's, it never goes back while a process lives."""

import time

_START = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the Unix time, in seconds, as if the system's clock had not been set since this process began."""
    return _START + time.monotonic()
