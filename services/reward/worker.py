"""`python -m services.reward.worker [PLAN]`: encloses itself first, while it has a single thread."""

import os
import sys
from dataclasses import replace

from relaxd.sandbox.enclosure import Measure, Plan, enclose

SOCKET = "RELAXD_CHILD_SOCKET"
"""Environment variable of relaxd.process.child, which isn't imported here because its imports start threads."""


def main() -> None:
    """Serve the pool until its process ends."""
    plan, measures = None, list[Measure]()
    if len(sys.argv) > 1:
        plan = Plan.from_json(sys.argv.pop())
        measures = enclose(replace(plan, own=(*plan.own, os.path.dirname(os.environ[SOCKET]))))

    from services.reward.worker_rewards import serve

    serve(plan, measures)


if __name__ == "__main__":
    main()
