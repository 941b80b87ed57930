"""Calls of a service that may be away: limits those in flight and how often they begin, repeats those that don't reach
it, waits for it, and as long as its Retry-After says."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from relaxd.waiting import Backoff, duration, waiting
from services.reward.remote.breaker import Breaker
from services.reward.remote.errors import UnreachableError
from services.reward.remote.pace import Pace
from services.reward.slow import slow_after

T = TypeVar("T")

ATTEMPTS = 10
"""Attempts for the same call: it may be what crashes the service."""
PAUSE = Backoff(first_seconds=0.5, max_seconds=30.0)
"""Pauses between them, to which up to a half is added at random."""

LOOK_SECONDS = 5.0
"""Interval at which a call that waits for its turn looks again. Shorter than any health limit: each look counts as
progress of the replica."""


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
        per_second: float = 0.0,
        turn: str = "",
    ) -> None:
        """See Breaker for `who`, `on` and `probe`.

        `timeout_seconds` is the deadline of a call, which the calls themselves keep; `outage_seconds` how long they
        wait for a service that is away, or that wants to be left alone. `per_second` is how many calls begin in a
        second, 0 any number; `turn` is what a call then waits for, with its setting.
        """
        self._who, self._on = who, on
        self._probe = probe
        self._breaker = Breaker(who, on, probe)
        self._room = asyncio.Semaphore(max_in_flight)
        self._timeout_seconds = timeout_seconds
        self._outage_seconds = outage_seconds
        self._pace = Pace(per_second)
        self._turn_name = turn or f"a turn to call {who}"
        self._turn = asyncio.Lock()  # of the call that begins next
        self._looks = 0
        self._open_calls: dict[int, float] = {}
        self._calls = 0

    @property
    def pieces(self) -> int:
        """A counter of probes and looks, which shows that whoever waits for the service isn't stuck."""
        return self._breaker.probes + self._looks

    @property
    def detail(self) -> str:
        """Call that takes long, in one sentence; empty if none does."""
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
                self._pace.hold(min(error.retry_after, self._outage_seconds))
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
            await self._begin()
            self._calls += 1
            number = self._calls
            self._open_calls[number] = time.monotonic()
            try:
                return await call()
            finally:
                del self._open_calls[number]

    async def _begin(self) -> None:
        """Wait for a turn: when the rate allows one more call, and the service's Retry-After is over."""
        if not self._turn.locked() and not self._pace.pause():
            self._pace.begin()
            return
        refused = f"{self._who}, which answered Retry-After"
        with waiting(refused if self._pace.held else self._turn_name, on=self._on) as wait:
            async with self._turn:
                while pause := self._pace.pause():
                    if self._pace.held:
                        wait.reason = refused
                    await asyncio.sleep(min(pause, LOOK_SECONDS))
                    self._looks += 1
                self._pace.begin()
