"""The speed of an engine without the engine: samples share its tokens per second."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable

ROUNDING_TOKENS = 1e-3
"""A sample that lacks less than this has ended."""


class Decoder:
    """Decodes samples that run at the same time, each as fast as the others. Lives in one event loop.

    Its clock counts the tokens that each running sample has got so far, `position`: a sample of L tokens that starts at
    position p ends at position p + L, whatever the speed is meanwhile.
    """

    def __init__(
        self,
        tokens_per_second: float,
        sample_tokens_per_second: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tokens_per_second` of all samples together, `sample_tokens_per_second` of one at most."""
        self._all, self._one = tokens_per_second, sample_tokens_per_second
        self._clock = clock
        self._last = clock()
        self._position = 0.0
        self._paused = False
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.tokens = 0.0
        """Tokens decoded so far, of all samples."""

    @property
    def running(self) -> int:
        """Samples in progress."""
        return len(self._ends)

    @property
    def speed(self) -> float:
        """Tokens per second of each sample now."""
        if self._paused or not self._ends:
            return 0.0
        return min(self._one, self._all / len(self._ends))

    @property
    def position(self) -> float:
        """Tokens that a sample would have got if it had been running from the beginning."""
        now = self._clock()
        passed = self.speed * (now - self._last)
        self._position += passed
        self.tokens += passed * len(self._ends)
        self._last = now
        return self._position

    def pause(self, paused: bool) -> None:
        """Stop all samples where they are, or let them go on."""
        self._advance()
        self._paused = paused
        self._plan()

    async def decode(self, length: int, begin: float | None = None) -> None:
        """Return when a sample that started at position `begin` (now) has `length` tokens."""
        end = asyncio.get_running_loop().create_future()
        self._advance()
        start = self._position if begin is None else begin
        heapq.heappush(self._ends, (start + length, next(self._numbers), end))
        self._plan()
        try:
            await end
        except asyncio.CancelledError:
            self._advance()
            self._ends = [entry for entry in self._ends if entry[2] is not end]
            heapq.heapify(self._ends)
            self._plan()
            raise

    def _advance(self) -> None:
        """Count the tokens since the last change, and end the samples that are complete."""
        position = self.position
        while self._ends and self._ends[0][0] <= position + ROUNDING_TOKENS:
            _, _, end = heapq.heappop(self._ends)
            if not end.done():
                end.set_result(None)

    def _plan(self) -> None:
        """Wake up when the next sample ends, at the present speed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if speed := self.speed:
            seconds = max(0.0, (self._ends[0][0] - self._position) / speed)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        self._plan()
