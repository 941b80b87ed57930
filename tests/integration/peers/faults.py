"""Writing down calls, and going wrong in them on command."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from relaxd.rpc.errors import FailedPrecondition, InvalidArgument


class Calls:
    """Writes down every call, and does what the faults say."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._faults = json.loads(os.environ.get("PEER_FAULTS", "{}"))
        self._log = os.environ.get("PEER_LOG")

    def note(self, method: str, **values: Any) -> str | None:
        """One call; returns what has to go wrong in it."""
        self._counts[method] += 1
        if self._log:
            with Path(self._log).open("a") as file:
                file.write(json.dumps({"time": time.time(), "method": method, **values}) + "\n")
        return self._faults.get(method, {}).get(str(self._counts[method]))


class SyncIds:
    """Refuses ids below the last one seen."""

    def __init__(self) -> None:
        self.last = 0

    def check(self, sync_id: int) -> None:
        if sync_id and sync_id < self.last:
            raise FailedPrecondition(f"synchronisation {sync_id} is over: {self.last} was seen")
        self.last = max(self.last, sync_id)


async def misbehave(fault: str | None) -> None:
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "stall":
        await asyncio.sleep(3600)
    if fault == "fail":
        raise RuntimeError("told to fail")
    if fault == "misfit":
        raise InvalidArgument("the model has no lm_head.weight")
