"""`python -m services.reward.worker [PLAN]`: starts a reward worker. The process encloses itself first, while it has a
single thread."""

import os
import sys
from dataclasses import replace

from relaxd.sandbox.enclosure import Measure, Plan, enclose

SOCKET = "RELAXD_CHILD_SOCKET"
"""Name of the environment variable with the worker's socket, as in relaxd.process.child. That module isn't imported
here because its imports start threads."""


def main() -> None:
    """Enclose this process if a plan is given, then serve the worker pool until the process ends."""
    plan, measures = None, list[Measure]()
    if len(sys.argv) > 1:
        plan = Plan.from_json(sys.argv.pop())
        measures = enclose(replace(plan, own=(*plan.own, os.path.dirname(os.environ[SOCKET]))))

    from services.reward.worker_rewards import serve

    serve(plan, measures)


if __name__ == "__main__":
    main()
