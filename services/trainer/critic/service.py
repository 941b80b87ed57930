"""The critic's service as a replica. It must see the folder of the run, whose steps it follows."""

import time
from pathlib import Path

from relaxd.config import RunConfig
from relaxd.rpc.errors import FailedPrecondition
from relaxd.run_folder import is_run
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.waiting import waiting
from services.trainer.frozen.service import StageService

FOLDER_SECONDS = 10.0
"""How long a run's folder may take to appear: a network file system shows new files late."""
POLL_SECONDS = 0.2


class CriticService(StageService):
    """Gives the values of groups, and trains on each step once it is committed."""

    rank_module = "services.trainer.critic.rank"

    def _check(self, config: RunConfig, assignment: Assignment) -> None:
        folder, deadline = Path(assignment.folder), time.monotonic() + FOLDER_SECONDS
        with waiting(f"the run's folder {folder}", on="the file system"):
            while not is_run(folder):
                if time.monotonic() > deadline:
                    raise FailedPrecondition(
                        f"the critic doesn't see the run's folder: {folder} has no run.json and config.json here. It "
                        "trains on the step files that the trainer writes there: mount the folder that coordinator and "
                        "trainer have at the same path"
                    )
                time.sleep(POLL_SECONDS)  # named: above

    def _folder(self, assignment: Assignment) -> str:
        return assignment.folder
