"""`python -m tests.integration.scoring.enclosed`: scores samples with a pool of workers.

Reads {"config": of the reward, "samples": [...], "secret_files": [...], "forbid": whether the kernel is to forbid
namespaces, as in a container with Docker's default profile}. Prints {"error": why the reward can't be loaded,
"outcomes": [reward or reason], "measures": {name: how it is enforced, or ""}}.
"""

import asyncio
import json
import sys
from typing import Any

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.sandbox import privileges, seccomp
from services.reward.worker_pool import WorkerPool

SECONDS = 60.0


async def score(asked: dict[str, Any]) -> dict[str, Any]:
    """Do what the module says."""
    pool = WorkerPool(1, RewardConfig(**asked["config"]), secret_files=asked["secret_files"])
    try:
        failure = await pool.load("")
        outcomes = [
            outcome
            for sample in asked["samples"]
            for outcome in await pool.score("", [RewardInput(**sample)], SECONDS)
            if failure is None
        ]
    finally:
        pool.close()
    return {
        "error": failure and failure.reason,
        "outcomes": [one.reward if isinstance(one, RewardOutput) else one.reason for one in outcomes],
        "measures": {one.name: one.by for one in pool.enclosure},
    }


def main() -> None:
    """Run the program."""
    asked = json.load(sys.stdin)
    if asked["forbid"]:
        privileges.drop_capabilities()
        privileges.no_new_privileges()
        seccomp.filter_programs(network=True)
    print(json.dumps(asyncio.run(score(asked))))


if __name__ == "__main__":
    main()
