"""A limit on the work of a piece of a reward, within the deadline of its sample."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_SECONDS = 0.1


class TooSlow(BaseException):
    """The time is over. It isn't an Exception, because packages such as sympy catch those."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the body once the process has computed for `seconds`, so that a busy machine changes no reward.

    An answer that makes a checker run for ever is then a wrong answer, and doesn't cost its whole group. It uses
    SIGVTALRM, so it does nothing outside the main thread, and doesn't nest; workers score in their main thread. C code
    that doesn't look for signals, such as a power of huge numbers, isn't interrupted: the sample's deadline ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"longer than {seconds:g} s")

    handler = signal.signal(signal.SIGVTALRM, stop)
    # Repeated, in case the first exception is swallowed by a finalizer.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
