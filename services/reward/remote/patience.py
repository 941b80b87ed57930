"""Calls of a service that may be away: when each may start, and when to repeat it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from relaxd.waiting import Backoff, duration, waiting
from services.reward.deadline import slow_after
from services.reward.remote.foreign_calls import MismatchError, UnreachableError


class Pace:
    """Starts calls at even intervals, and none during a pause that the service requested."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_second` is the most calls that begin in a second; 0: any number. `clock` returns seconds."""
        self._interval = 1 / per_second if per_second else 0.0
        self._clock = clock
        self._next = self._held_until = clock()

    @property
    def held(self) -> bool:
        """True during a pause that the service requested."""
        return self._clock() < self._held_until

    def pause(self) -> float:
        """Return the seconds until a call may start; 0: now."""
        return max(0.0, self._next - self._clock(), self._held_until - self._clock())

    def begin(self) -> None:
        """Record that a call starts."""
        self._next = self._clock() + self._interval

    def hold(self, seconds: float) -> None:
        """Start no call for this many seconds, or for longer if that was requested before."""
        self._held_until = max(self._held_until, self._clock() + seconds)


FAILURES_TO_OPEN = 3
"""Calls in a row that don't reach the service."""
PROBE_PAUSE = Backoff(first_seconds=0.5, max_seconds=10.0)
"""Pauses before probes. They are shorter than any health limit, because each probe counts as progress of the
replica."""
START_NOTICE_SECONDS = 300.0
"""Seconds after which a starting service is late and its wait is logged as a warning."""

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
        self._starting = False
        """True if the service is not there yet, by the last call or probe."""
        self._warned = False
        self._began = 0.0
        """Start of the time in which calls are held back."""
        self._since: float | None = None
        """`_began`, moved on by the time in which the service was starting; None while calls go through."""
        self._closed = asyncio.Event()
        self._closed.set()
        self._probing: asyncio.Task[None] | None = None
        self.probes = 0
        """Number of probes so far."""

    @property
    def problem(self) -> str:
        """Description of the problem in one sentence; empty while calls go through."""
        if self._since is None:
            return ""
        if self._starting:
            seconds = time.monotonic() - self._began
            return f"waiting for {self._who}, which is starting, for {duration(seconds)} now: {self._error}"
        seconds = time.monotonic() - self._since
        return f"{self._who} does not answer, for {duration(seconds)} now: {self._error}"

    def succeeded(self) -> None:
        """Record a call that the service answered, in any way."""
        self._failures = 0

    def failed(self, error: UnreachableError) -> None:
        """Report a call that didn't reach the service."""
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self.open(error)

    def open(self, error: UnreachableError) -> None:
        """Hold calls back until a probe reaches the service."""
        if self._since is None:
            self._began = self._since = time.monotonic()
            self._warned = False
            self._closed.clear()
            self._observe(error)
            self._probing = asyncio.create_task(self._probe_until_closed())

    def _observe(self, error: UnreachableError | MismatchError) -> None:
        """Record the reason why a call or a probe did not reach the service, and log it once."""
        starting = isinstance(error, UnreachableError) and error.starting
        if starting and not self._starting:
            _log.info("waiting for %s, which is starting: %s", self._who, error)
        elif not starting and not self._warned:
            _log.warning("%s does not answer: %s; its samples wait", self._who, error)
            self._warned = True
        self._error, self._starting = str(error), starting
        if starting:
            self._since = time.monotonic()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[Callable[[], None]]:
        """Name a wait for the service to do something. Yields a function that brings its text up to date."""
        with waiting("", on=self._on) as wait:

            def describe() -> None:
                wait.reason = f"{self._who}, which is starting" if self._starting else f"{self._who} to {what}"
                if self._starting:
                    wait.next_notice = max(wait.next_notice, START_NOTICE_SECONDS)

            describe()
            yield describe

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
        with self._waiting("answer") as describe:
            while self._since is not None:
                if (left := self._since + seconds - time.monotonic()) <= 0:
                    raise UnreachableError(self.problem)
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, LOOK_SECONDS)):
                        await self._closed.wait()  # named: by _waiting
                describe()

    def close(self) -> None:
        """End probing."""
        if self._probing is not None:
            self._probing.cancel()

    async def _probe_until_closed(self) -> None:
        failures = 1
        with self._waiting("answer a probe") as describe:
            while True:
                await asyncio.sleep(PROBE_PAUSE.pause(failures))  # named: by _waiting
                try:
                    await self._probe()
                    break
                except (UnreachableError, MismatchError) as error:
                    self._observe(error)
                    describe()
                    failures += 1
                finally:
                    self.probes += 1
        _log.log(logging.WARNING if self._warned else logging.INFO, "%s answers now", self._who)
        self._since, self._failures, self._starting = None, 0, False
        self._closed.set()


T = TypeVar("T")

ATTEMPTS = 10
"""Maximum attempts of the same call, which may be what crashes the service."""
PAUSE = Backoff(first_seconds=0.5, max_seconds=30.0)
"""Pauses between attempts."""

LOOK_SECONDS = 5.0
"""Seconds between two checks of a call that waits for its turn. They are fewer than any health limit, because each
check counts as progress of the replica."""


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
        """`who`, `on` and `probe` are those of `Breaker`.

        `timeout_seconds` is the deadline of a call, which the calls themselves keep; `outage_seconds` how long they
        wait for a service that is away, or that wants to be left alone. `per_second` is how many calls begin in a
        second, 0 any number; `turn` is what a call then waits for, with its setting.
        """
        self._who, self._on = who, on
        self.probe = probe
        """Ask whether the service works. Raises UnreachableError, MismatchError."""
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
        """A counter of probes and checks, which shows that a caller that waits for the service isn't stuck."""
        return self._breaker.probes + self._looks

    @property
    def detail(self) -> str:
        """Description of a slow call in one sentence; empty if there is none."""
        if problem := self._breaker.problem:
            return problem
        seconds = time.monotonic() - min(self._open_calls.values(), default=time.monotonic())
        if seconds <= slow_after(self._timeout_seconds):
            return ""
        count = len(self._open_calls)
        return f"{self._who} has {count} open calls, one for {duration(seconds)}"

    async def start(self) -> None:
        """Start with a service that may be away for now. Raises MismatchError if it has another protocol."""
        try:
            await self.probe()
        except UnreachableError as error:
            self._breaker.open(error)

    def forgive(self) -> None:
        """Count `outage_seconds` of a service that is away from now on."""
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
                await asyncio.sleep(PAUSE.spread_pause(attempt))
        raise AssertionError("the last attempt returns or raises")

    def end_probing(self) -> None:
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
        """Wait until the rate allows one more call, and the service's Retry-After is over."""
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
