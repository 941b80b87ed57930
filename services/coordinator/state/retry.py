"""Retries of Redis operations while Redis is away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from relaxd.board import BoardUnavailable
from relaxd.waiting import waiting
from services.coordinator.state.store import StoreUnavailable

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

RETRY_SECONDS = 0.5
WARN_EVERY = 20
"""Failed attempts between two warnings."""


class RedisRetry:
    """Repeats an operation until Redis answers, and logs who waits."""

    def __init__(self, owner: str) -> None:
        """`owner` appears in the log, such as "run demo"."""
        self._owner = owner

    async def call(self, operation: Callable[..., Awaitable[Result]], *arguments: Any, **named: Any) -> Result:
        """Await the operation until Redis answers. Raises whatever else the operation raises."""
        attempt = 0
        with ExitStack() as waits:
            while True:
                try:
                    return await operation(*arguments, **named)
                except (StoreUnavailable, BoardUnavailable) as error:
                    if attempt == 0:
                        waits.enter_context(waiting(f"Redis, for {self._owner}", on="redis"))
                    if attempt % WARN_EVERY == 0:
                        logger.warning("%s waits for Redis: %s", self._owner, error)
                    attempt += 1
                    await asyncio.sleep(RETRY_SECONDS)  # named: above

    async def in_thread(self, operation: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Run a blocking operation in a thread until Redis answers. Raises whatever else the operation raises."""
        return await self.call(asyncio.to_thread, operation, *arguments, **named)
