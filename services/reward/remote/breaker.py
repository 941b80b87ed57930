"""A circuit breaker: while a service can't be reached, one probe at a time asks it, and everybody else waits."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from relaxd.waiting import Backoff, duration, waiting
from services.reward.remote.errors import MismatchError, UnreachableError

FAILURES_TO_OPEN = 3
"""Calls in a row that don't reach the service."""
PROBE_PAUSE = Backoff(first_seconds=0.5, max_seconds=10.0)
"""Pauses before probes. Shorter than any health limit: each probe counts as progress of the replica."""

_log = logging.getLogger(__name__)


class Breaker:
    """Lets calls through while the service answers. Lives in one event loop."""

    def __init__(self, who: str, on: str, probe: Callable[[], Awaitable[None]]) -> None:
        """`who` is the service, for people, and `on` its address or another name.

        `probe` raises UnreachableError or MismatchError unless it works.
        """
        self._who = who
        self._on = on
        self._probe = probe
        self._failures = 0
        self._error = ""
        self._since: float | None = None
        self._closed = asyncio.Event()
        self._closed.set()
        self._probing: asyncio.Task[None] | None = None
        self.probes = 0
        """Number of probes so far."""

    @property
    def problem(self) -> str:
        """Description of what is wrong, in one sentence; empty while calls go through."""
        if self._since is None:
            return ""
        seconds = time.monotonic() - self._since
        return f"{self._who} does not answer, for {duration(seconds)} now: {self._error}"

    def succeeded(self) -> None:
        """Report a call that the service answered, whatever it said."""
        self._failures = 0

    def failed(self, error: UnreachableError) -> None:
        """Report a call that didn't reach the service."""
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self.open(error)

    def open(self, error: UnreachableError) -> None:
        """Hold calls back until a probe reaches the service."""
        self._error = str(error)
        if self._since is not None:
            return
        self._since = time.monotonic()
        self._closed.clear()
        _log.warning("%s does not answer: %s; its samples wait", self._who, error)
        self._probing = asyncio.create_task(self._probe_until_closed())

    def forgive(self) -> None:
        """Count the time that the service is away from now on."""
        if self._since is not None:
            self._since = time.monotonic()

    async def wait_closed(self, seconds: float) -> None:
        """Wait until calls may go through, at most until the service has been away for `seconds`.

        Raises UnreachableError with the reason.
        """
        if self._since is None:
            return
        left = self._since + seconds - time.monotonic()
        try:
            with waiting(f"{self._who} to answer", on=self._on):
                await asyncio.wait_for(self._closed.wait(), max(0.0, left))
        except TimeoutError:
            raise UnreachableError(self.problem) from None

    def close(self) -> None:
        """End probing."""
        if self._probing is not None:
            self._probing.cancel()

    async def _probe_until_closed(self) -> None:
        failures = 1
        with waiting(f"{self._who} to answer a probe", on=self._on):
            while True:
                await asyncio.sleep(PROBE_PAUSE.pause(failures))
                try:
                    await self._probe()
                    break
                except (UnreachableError, MismatchError) as error:
                    self._error = str(error)
                    failures += 1
                finally:
                    self.probes += 1
        _log.warning("%s answers again", self._who)
        self._since, self._failures = None, 0
        self._closed.set()
