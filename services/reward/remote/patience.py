"""Calls of a service that may be away: limits those in flight, repeats those that don't reach it, waits for it."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from relaxd.retry import Backoff
from relaxd.waiting import duration, waiting
from services.reward.remote.breaker import Breaker
from services.reward.remote.errors import UnreachableError
from services.reward.slow import slow_after

T = TypeVar("T")

ATTEMPTS = 10
"""Attempts for the same call: it may be what crashes the service."""
PAUSE = Backoff(first_seconds=0.5, max_seconds=30.0)
"""Pauses between them, to which up to a half is added at random."""


class PatientCaller:
    """Calls a service. Lives in one event loop."""

    def __init__(
        self,
        who: str,
        on: str,
        probe: Callable[[], Awaitable[None]],
        *,
        max_in_flight: int,
        timeout_seconds: float,
        outage_seconds: float,
    ) -> None:
        """See Breaker for `who`, `on` and `probe`.

        `timeout_seconds` is the deadline of a call, which the calls themselves keep; `outage_seconds` how long they
        wait for a service that is away.
        """
        self._who, self._on = who, on
        self._probe = probe
        self._breaker = Breaker(who, on, probe)
        self._room = asyncio.Semaphore(max_in_flight)
        self._timeout_seconds = timeout_seconds
        self._outage_seconds = outage_seconds
        self._open_calls: dict[int, float] = {}
        self._calls = 0

    @property
    def probes(self) -> int:
        """Number of probes of a service that is away."""
        return self._breaker.probes

    @property
    def detail(self) -> str:
        """What takes long, in one sentence; empty if nothing does."""
        if problem := self._breaker.problem:
            return problem
        seconds = time.monotonic() - min(self._open_calls.values(), default=time.monotonic())
        if seconds <= slow_after(self._timeout_seconds):
            return ""
        count = len(self._open_calls)
        return f"{self._who} has {count} open calls, one for {duration(seconds)}"

    async def start(self) -> None:
        """Begin with a service that may be away for now. Raises MismatchError: it isn't such a service."""
        try:
            await self._probe()
        except UnreachableError as error:
            self._breaker.open(error)

    def forgive(self) -> None:
        """Count the time that the service is away from now on."""
        self._breaker.forgive()

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call, which is repeated as long as it raises UnreachableError.

        Raises UnreachableError: ATTEMPTS calls in a row, or the service was away for too long; and what `call` raises.
        """
        for attempt in range(1, ATTEMPTS + 1):
            await self._breaker.wait_closed(self._outage_seconds)
            try:
                result = await self._limited(call)
                self._breaker.succeeded()
                return result
            except UnreachableError as error:
                self._breaker.failed(error)
                if attempt == ATTEMPTS:
                    raise UnreachableError(f"{self._who} can't be reached: {error} ({ATTEMPTS} tries)") from error
            with waiting(f"the next try to reach {self._who}", on=self._on):
                await asyncio.sleep(PAUSE.pause(attempt) * (1 + random.random() / 2))
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """End probing."""
        self._breaker.close()

    async def _limited(self, call: Callable[[], Awaitable[T]]) -> T:
        async with self._room:
            self._calls += 1
            number = self._calls
            self._open_calls[number] = time.monotonic()
            try:
                return await call()
            finally:
                del self._open_calls[number]
