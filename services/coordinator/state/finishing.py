"""Work that goes on when its caller is gone."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from relaxd.rpc.errors import RpcError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


async def finish(work: Coroutine[Any, Any, Result], what: str) -> Result:
    """Finish the work even if the caller is cancelled. `what` appears in the log, such as "a scale request"."""
    task = asyncio.create_task(work)

    def log_failure(task: "asyncio.Task[Result]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            bug = None if isinstance(error, RpcError) else error
            logger.warning("%s failed after its caller was gone: %s", what, error, exc_info=bug)

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(log_failure)
        raise
