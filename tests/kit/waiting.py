"""Waiting for what sends no event: poll, with a deadline and a reason."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")
Errors = tuple[type[Exception], ...]
PAUSE_SECONDS = 0.02
PATIENCE = float(os.environ.get("RELAXD_TEST_PATIENCE", "1"))
"""Multiplies every deadline: for machines that do much else meanwhile, as in continuous integration."""


def wait_until(
    condition: Callable[[], Result],
    what: str = "the test's condition",
    seconds: float = 60.0,
    *,
    forgive: Errors = (),
    explain: Callable[[], object] = str,
    pause_seconds: float = PAUSE_SECONDS,
) -> Result:
    """Poll until `condition` returns something true, and return it.

    Errors of the types `forgive` count as false. Raises AssertionError after PATIENCE times `seconds`: it says `what`
    was waited for, what the condition returned or raised last, and what `explain` returns then, such as logs.
    """
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    last: object = None
    while True:
        late = time.monotonic() > deadline
        try:
            if result := condition():
                return result
            last = result
        except forgive as error:
            last = error
        if late:
            raise AssertionError(f"not within {seconds:g} s: {what} (last: {last!r})\n{explain()}")
        time.sleep(pause_seconds)


async def eventually(
    condition: Callable[[], Result | Awaitable[Result]], what: str = "the test's condition", seconds: float = 60.0
) -> Result:
    """`wait_until` for coroutines: others go on meanwhile. The condition may be one."""
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline
        found = condition()
        result: Result = await found if isinstance(found, Awaitable) else found
        if result:
            return result
        assert not late, f"not within {seconds:g} s: {what} (last: {result!r})"
        await asyncio.sleep(PAUSE_SECONDS)
