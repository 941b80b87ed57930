"""The SGLang engine's process with schedulers that a test can hold up. It says what it asks them."""

import os
import time
from pathlib import Path
from typing import Any

from services.rollout.engines.engine_process import read_arguments
from services.rollout.engines.sglang import scheduler, scheduler_launch
from services.rollout.engines.sglang.schedulers import PauseForUpdate
from services.rollout.engines.sglang.sglang_process import SGLangProcess

FOLDER_VARIABLE = "RELAXD_TEST_HELD"
"""Environment variable with a folder. While it has a file "hold", the schedulers' loops take no messages and do no
steps. The engine writes a line to the file "updates" for each update: the number of the pause that it begins, or 0."""


class HeldScheduler(scheduler.ControlledScheduler):
    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        while Path(os.environ[FOLDER_VARIABLE], "hold").exists():
            time.sleep(0.005)
        super().process_input_requests(recv_reqs)


class TellingChannel(scheduler_launch.MessageChannel):
    def send(self, message: Any) -> None:
        super().send(message)
        if isinstance(message, PauseForUpdate):
            with Path(os.environ[FOLDER_VARIABLE], "updates").open("a") as updates:
                updates.write(f"{message.rid or 0}\n")


def run_held_scheduler(*args: Any) -> None:
    """Run a scheduler process."""
    scheduler.ControlledScheduler = HeldScheduler  # type: ignore[misc]
    scheduler.run_scheduler(*args)


if __name__ == "__main__":
    read_arguments()
    from tests.integration.rollout.sglang import held_engine  # scheduler processes import it by this name

    scheduler_launch.MessageChannel = TellingChannel  # type: ignore[misc]
    scheduler_launch._Launcher.run_scheduler_process_func = staticmethod(held_engine.run_held_scheduler)
    SGLangProcess().serve()
