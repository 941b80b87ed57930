"""A bound on the tokens that an engine has at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TokenBudget:
    """Admits requests in the order in which they come, as long as their tokens fit; a larger one goes alone."""

    def __init__(self, most: int) -> None:
        """`most`: tokens at a time."""
        self._most = most
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()
        self.used = 0
        """Tokens of the requests that are admitted now."""

    @asynccontextmanager
    async def hold(self, tokens: int) -> AsyncIterator[None]:
        """Wait until there is room for `tokens` tokens, and take it for the block."""
        async with self._turn, self._freed:  # in turns, or a large one would wait for ever
            while self.used and self.used + tokens > self._most:
                await self._freed.wait()  # brief: the deadlines of the requests that were admitted
            self.used += tokens
        try:
            yield
        finally:
            self.used -= tokens
            async with self._freed:
                self._freed.notify_all()
