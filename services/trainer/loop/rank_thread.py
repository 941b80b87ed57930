"""The thread in which a rank process works, and the events that it tells the service."""

import logging
import os
import threading
import time
from collections.abc import Callable

from relaxd import telemetry
from relaxd.config import RunConfig
from relaxd.process.child_server import Outbox
from relaxd.rpc.errors import InvalidArgument
from relaxd.v1.rank_pb2 import WorkRequest, WorkResponse

END_SECONDS = 5.0
"""Time in which the parent reads why a rank failed, and kills it."""

logger = logging.getLogger(__name__)


class RankThread:
    """Runs a rank's work. Any error ends the process; the parent then restarts the world or the replica."""

    def __init__(self) -> None:
        self.number = int(os.environ.get("RANK", "0"))
        self.alone = os.environ.get("WORLD_SIZE", "1") == "1"
        """True if there is no other rank."""
        self.events: Outbox[WorkResponse] = Outbox()

    def start(self, request: WorkRequest, work: Callable[[WorkRequest], None]) -> None:
        """Run `work`, which doesn't return, in a new thread."""
        threading.Thread(target=self._run, args=(request, work), name=request.role, daemon=True).start()

    def fail(self, reason: str, *, start_refused: bool = False) -> None:
        """Tell the service why this rank can't go on; `start_refused` is WorkResponse's."""
        self.events.put(WorkResponse(failed=reason, start_refused=start_refused))

    def _run(self, request: WorkRequest, work: Callable[[WorkRequest], None]) -> None:
        telemetry.setup_logging(f"{request.replica_id}/rank{self.number}", request.log_level)
        logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
        telemetry.setup(request.role, request.replica_id, f"rank{self.number}")
        config = RunConfig.model_validate_json(request.config_json)
        telemetry.write_traces(config.trace_folder(request.folder))
        try:
            work(request)
        except BaseException as error:
            logger.exception("rank %d failed", self.number)
            self.fail(f"{type(error).__name__}: {error}", start_refused=isinstance(error, InvalidArgument))
            telemetry.shutdown()
            time.sleep(END_SECONDS)
            os._exit(1)
