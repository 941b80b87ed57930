"""Retries while Redis, a run's folder or a media host is unavailable, and work that outlives its caller."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from relaxd.board import BoardUnavailable
from relaxd.config import DataConfig
from relaxd.data.vision import PromptHostAway
from relaxd.rpc.errors import RpcError
from relaxd.waiting import Wait
from services.coordinator.state.store import StoreUnavailable

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])

MEDIA_HOST = "a media host"
"""Value of Wait.on while a run waits for a media host."""
RETRY_SECONDS = 0.5
WARN_EVERY = 20
"""Number of failed attempts from one warning to the next."""
HUNG_SECONDS = 20.0
"""Seconds after which an operation on a folder counts as waiting for its disk, such as an unreachable network file
system."""


class Retry:
    """Repeats an operation that needs Redis, a folder or a media host until it succeeds, and shows its waits."""

    hung_seconds: float | None = None
    """Seconds after which a slow attempt counts as waiting; None if attempts have their own deadline."""

    def __init__(
        self,
        owner: str,
        needs: str,
        errors: tuple[type[Exception], ...],
        *,
        on: str = "",
        disk: bool = False,
        max_seconds: float = math.inf,
    ) -> None:
        """`owner`: name in the log, such as "run demo"; `needs`: name of the requirement; `errors`: types of the errors
        that an operation raises while its requirement is unavailable.

        `on` and `disk`: fields of the Wait that is shown. An error more than `max_seconds` after a call's first error
        is raised.
        """
        self._owner = owner
        self._needs = needs
        self._errors = errors
        self._on = on
        self._disk = disk
        self._max_seconds = max_seconds
        self._waits: set[Wait] = set()

    @property
    def waiting(self) -> bool:
        """True while an operation waits because a requirement is unavailable."""
        return bool(self._waits)

    async def call(self, operation: Callable[..., Awaitable[Result]], *arguments: Any, **named: Any) -> Result:
        """Repeat an operation until it raises none of `errors`. Raises other errors at once, and one of `errors` if it
        still occurs `max_seconds` after the first."""
        attempt, failed = 0, math.inf
        with ExitStack() as ends:
            wait = Wait(f"{self._needs}, for {self._owner}: no answer", self._on, disk=self._disk)
            if self.hung_seconds is not None:
                loop = asyncio.get_running_loop()
                ends.callback(loop.call_later(self.hung_seconds, self._begin, wait, ends).cancel)
            while True:
                try:
                    return await operation(*arguments, **named)
                except self._errors as error:
                    failed = min(failed, time.monotonic())
                    if time.monotonic() - failed >= self._max_seconds:
                        raise
                    wait.reason = f"{self._needs}, for {self._owner}: {error}"
                    self._begin(wait, ends)
                    if attempt % WARN_EVERY == 0:
                        logger.warning("%s waits for %s: %s", self._owner, self._needs, error)
                    attempt += 1
                    await asyncio.sleep(RETRY_SECONDS)  # named: above

    def _begin(self, wait: Wait, ends: ExitStack) -> None:
        """Show a wait among the process's waits until `ends` closes. Does nothing if the wait is already shown."""
        if wait not in self._waits:
            self._waits.add(wait)
            ends.callback(self._waits.discard, wait)
            ends.enter_context(wait.named())

    async def in_thread(self, operation: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """In a thread, repeat a blocking operation as `call` does."""
        return await self.call(asyncio.to_thread, operation, *arguments, **named)


class RedisRetry(Retry):
    """Repeats an operation until Redis answers."""

    def __init__(self, owner: str) -> None:
        """`owner`: name in the log, such as "run demo"."""
        super().__init__(owner, "Redis", (StoreUnavailable, BoardUnavailable), on="redis")


class FolderRetry(Retry):
    """Repeats an operation until it can write to a run's folder, for example while the disk is full.

    A failed operation must leave nothing behind that a repetition would duplicate.
    """

    hung_seconds = HUNG_SECONDS

    def __init__(self, owner: str, folder: Path) -> None:
        """`owner`: name in the log, such as "run demo"."""
        super().__init__(owner, f"the disk of {folder}", (OSError,), disk=True)


class MediaHostRetry(Retry):
    """Repeats reading prompts while a host of their media doesn't answer, for at most data.media_wait_seconds."""

    def __init__(self, owner: str, data: DataConfig) -> None:
        """`owner`: name in the log, such as "run demo"."""
        needs = f"{MEDIA_HOST} ({', '.join(data.media_hosts)})"
        super().__init__(owner, needs, (PromptHostAway,), on=MEDIA_HOST, max_seconds=data.media_wait_seconds)
        self.hung_seconds = HUNG_SECONDS if data.media_hosts else None


def outlives_caller(what: str) -> Callable[[Method], Method]:
    """Decorate an async method so that it finishes even if its caller is cancelled. `what`: name in the log, such as "a
    scale request"."""

    def log_failure(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            bug = None if isinstance(error, RpcError) else error
            logger.warning("%s failed after its caller was gone: %s", what, error, exc_info=bug)

    def decorate(work: Method) -> Method:
        @wraps(work)
        async def finish(*arguments: Any, **named: Any) -> Any:
            task = asyncio.create_task(work(*arguments, **named))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                task.add_done_callback(log_failure)
                raise

        return cast(Method, finish)

    return decorate
