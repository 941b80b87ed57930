"""The deadline of a reward's call, whose clock stands still while the judge is asked."""

import asyncio
from types import TracebackType


class Deadline:
    """Raises TimeoutError out of its block after `seconds`, not counting pauses. Lives in one event loop."""

    def __init__(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._timeout = asyncio.timeout(seconds)
        self._seconds = seconds
        self._left = seconds
        self._since = self._clock()
        self._pauses = 0
        self._over = False

    @property
    def seconds(self) -> float:
        """Time that has passed, without pauses."""
        running = 0.0 if self._pauses else self._clock() - self._since
        return self._seconds - self._left + running

    def pause(self) -> None:
        """Stop the clock until as many calls of `resume`."""
        self._pauses += 1
        if self._pauses == 1:
            self._left -= self._clock() - self._since
            self._set(None)

    def resume(self) -> None:
        """End a pause."""
        self._pauses -= 1
        if not self._pauses:
            self._since = self._clock()
            self._set(self._since + self._left)

    async def __aenter__(self) -> "Deadline":
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        await self._timeout.__aexit__(kind, error, traceback)

    def _set(self, when: float | None) -> None:
        if not self._over and not self._timeout.expired():
            self._timeout.reschedule(when)
