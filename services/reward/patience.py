"""Decides when calls of a service that may be unavailable start, and when they are repeated."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from relaxd.config import RewardConfig
from relaxd.waiting import Backoff, duration, waiting
from services.reward.deadline import slow_after
from services.reward.worker_enclosure import MissingVariableError


class UnreachableError(Exception):
    """The service doesn't answer or is too busy; the call may be repeated."""

    def __init__(self, message: str, *, retry_after: float = 0.0, starting: bool = False) -> None:
        """`retry_after`: seconds until the service wants the next call; 0 if it doesn't say.

        `starting`: True if the service has not failed, but is still starting.
        """
        super().__init__(message)
        self.retry_after = retry_after
        self.starting = starting


class MismatchError(Exception):
    """The service answers, but doesn't speak the expected protocol."""


def authorization(config: RewardConfig) -> dict[str, str]:
    """Return the headers with the token of reward.address_token; empty without a token. Raises MissingVariableError."""
    name = config.address_token
    if not name:
        return {}
    if not (token := os.environ.get(name, "").strip()):
        raise MissingVariableError(
            f"reward.address_token names {name}, not set in the reward service's environment: set it where that "
            "service is started"
        )
    return {"authorization": f"Bearer {token}"}


class Pace:
    """Spaces the calls of a service evenly, and starts none during a pause that the service requested."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_second`: maximum number of calls that begin per second, 0 for no limit. `clock` returns seconds."""
        self._interval = 1 / per_second if per_second else 0.0
        self._clock = clock
        self._next = self._held_until = clock()

    @property
    def held(self) -> bool:
        """True during a pause that the service requested."""
        return self._clock() < self._held_until

    def pause(self) -> float:
        """Return the seconds until a call may start; 0 if it may start now."""
        return max(0.0, self._next - self._clock(), self._held_until - self._clock())

    def begin(self) -> None:
        """Record that a call starts now."""
        self._next = self._clock() + self._interval

    def hold(self, seconds: float) -> None:
        """Start no calls for `seconds`. A longer pause that was requested before continues."""
        self._held_until = max(self._held_until, self._clock() + seconds)


FAILURES_TO_HOLD_BACK = 3
"""Number of consecutive calls that did not reach the service after which further calls wait for a successful probe."""
PROBE_PAUSE = Backoff(first_seconds=0.5, max_seconds=10.0)
"""Pauses before probes, in seconds. They are shorter than any health limit, because each probe counts as progress of
the replica."""
START_NOTICE_SECONDS = 300.0
"""Seconds after which a starting service is late and its wait is logged as a warning."""

ATTEMPTS = 10
"""Maximum attempts of one call: the call itself may crash the service."""
PAUSE = Backoff(first_seconds=0.5, max_seconds=30.0)
"""Pauses between attempts of one call, in seconds."""
LOOK_SECONDS = 5.0
"""Seconds between two checks of a call that waits for its turn. Less than any health limit, because each check counts
as progress of the replica."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class PatientCaller:
    """Calls a service, and holds calls back while it doesn't answer. Lives in one event loop."""

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
        """Create a caller of one service.

        Args:
            who: name of the service in messages.
            on: address or name of the service in reported waits.
            probe: checks the service; raises UnreachableError or MismatchError if it doesn't work.
            max_in_flight: maximum number of calls at a time.
            timeout_seconds: deadline that the calls enforce themselves; here it decides when a call counts as slow.
            outage_seconds: maximum length of an outage before calls fail, and of a pause that Retry-After requests.
            per_second: maximum number of calls that begin per second; 0: no limit.
            turn: what a call waits for when `per_second` delays it, such as "a question's turn"; "": a default text.
        """
        self._who = who
        self._on = on
        self.probe = probe
        """Check that the service works. Raises UnreachableError or MismatchError if it doesn't."""
        self._room = asyncio.Semaphore(max_in_flight)
        self._timeout_seconds = timeout_seconds
        self._outage_seconds = outage_seconds
        self._pace = Pace(per_second)
        self._turn_name = turn or f"a turn to call {who}"
        self._turn = asyncio.Lock()  # of the call that begins next
        self._looks = 0
        """Counter of probes of the service, and of checks by calls that wait for their turn."""
        self._open_calls: list[float] = []
        """Monotonic times at which the calls in progress began."""
        self._failures = 0
        """Number of consecutive calls that did not reach the service."""
        self._error = ""
        self._starting = False
        """True if the service was still starting at the last call or probe."""
        self._warned = False
        self._began = 0.0
        """Monotonic time since which calls are held back; while they go through, that of the last outage."""
        self._since: float | None = None
        """Monotonic time from which `outage_seconds` counts: later than `_began` if the service was starting. None
        while calls go through."""
        self._answers = asyncio.Event()
        """Event that is set while calls go through."""
        self._answers.set()
        self._probing: asyncio.Task[None] | None = None

    @property
    def pieces(self) -> int:
        """Counter of probes and checks. While it grows, a caller that waits for the service doesn't count as stuck."""
        return self._looks

    @property
    def detail(self) -> str:
        """Description of an outage, or of a slow call, in one sentence; empty if there is none."""
        if self._since is not None:
            return self._problem(self._since)
        seconds = time.monotonic() - min(self._open_calls, default=time.monotonic())
        if seconds <= slow_after(self._timeout_seconds):
            return ""
        return f"{self._who} has {len(self._open_calls)} open calls, one for {duration(seconds)}"

    async def start(self) -> None:
        """Probe the service, and hold calls back if it doesn't answer. Raises MismatchError if the service speaks
        another protocol."""
        try:
            await self.probe()
        except UnreachableError as error:
            self._hold_back(error)

    def forgive(self) -> None:
        """If the service is away, count `outage_seconds` from now on."""
        if self._since is not None:
            self._since = time.monotonic()

    def end_probing(self) -> None:
        """Cancel the task that probes the service."""
        if self._probing is not None:
            self._probing.cancel()

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and repeat it as long as it raises UnreachableError. Returns the call's result.

        Raises UnreachableError if all ATTEMPTS failed or the service was away for too long, and other errors of `call`.
        """
        for attempt in range(1, ATTEMPTS + 1):
            await self._wait_for_answers()
            try:
                result = await self._limited(call)
                self._failures = 0
                return result
            except UnreachableError as error:
                self._pace.hold(min(error.retry_after, self._outage_seconds))
                self._failures += 1
                if self._failures >= FAILURES_TO_HOLD_BACK:
                    self._hold_back(error)
                if attempt == ATTEMPTS:
                    raise UnreachableError(f"{self._who} can't be reached: {error} ({ATTEMPTS} tries)") from error
            with waiting(f"the next try to reach {self._who}", on=self._on):
                await asyncio.sleep(PAUSE.spread_pause(attempt))
        raise AssertionError("the last attempt returns or raises")

    async def _limited(self, call: Callable[[], Awaitable[T]]) -> T:
        async with self._room:
            await self._begin()
            begun = time.monotonic()
            self._open_calls.append(begun)
            try:
                return await call()
            finally:
                self._open_calls.remove(begun)

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

    def _problem(self, since: float) -> str:
        if self._starting:
            seconds = time.monotonic() - self._began
            return f"waiting for {self._who}, which is starting, for {duration(seconds)} now: {self._error}"
        return f"{self._who} does not answer, for {duration(time.monotonic() - since)} now: {self._error}"

    def _hold_back(self, error: UnreachableError) -> None:
        """Hold all calls back, and probe the service until a probe reaches it."""
        if self._since is None:
            self._began = self._since = time.monotonic()
            self._warned = False
            self._answers.clear()
            self._observe(error)
            self._probing = asyncio.create_task(self._probe_until_it_answers())

    def _observe(self, error: UnreachableError | MismatchError) -> None:
        """Record why a call or a probe did not reach the service. Logs only the first reason of an outage."""
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
        """Show the process's wait for the service to do something. Yields a function that updates the wait's text."""
        with waiting("", on=self._on) as wait:

            def describe() -> None:
                wait.reason = f"{self._who}, which is starting" if self._starting else f"{self._who} to {what}"
                if self._starting:
                    wait.next_notice = max(wait.next_notice, START_NOTICE_SECONDS)

            describe()
            yield describe

    async def _wait_for_answers(self) -> None:
        """Wait until the service answers probes again. Raises UnreachableError once it has been away for too long."""
        if self._since is None:
            return
        with self._waiting("answer") as describe:
            while self._since is not None:
                if (left := self._since + self._outage_seconds - time.monotonic()) <= 0:
                    raise UnreachableError(self._problem(self._since))
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, LOOK_SECONDS)):
                        await self._answers.wait()  # named: by _waiting
                describe()

    async def _probe_until_it_answers(self) -> None:
        failures = 1
        with self._waiting("answer a probe") as describe:
            while True:
                await asyncio.sleep(PROBE_PAUSE.pause(failures))  # named: by _waiting
                try:
                    await self.probe()
                    break
                except (UnreachableError, MismatchError) as error:
                    self._observe(error)
                    describe()
                    failures += 1
                finally:
                    self._looks += 1
        _log.log(logging.WARNING if self._warned else logging.INFO, "%s answers now", self._who)
        self._since, self._failures, self._starting = None, 0, False
        self._answers.set()
