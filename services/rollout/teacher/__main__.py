"""`python -m services.rollout.teacher`: the service that computes log-probs with an SGLang engine."""

import asyncio

from relaxd.replica.replica_context import open_context
from relaxd.replica.replica_life import run_replica
from relaxd.roles import TEACHER
from relaxd.rpc.service_settings import parse_settings
from services.rollout.teacher.teacher_service import TeacherService


async def main() -> None:
    """Run the service until it is stopped."""
    async with open_context(parse_settings(TEACHER)) as context:
        await run_replica(TeacherService(context), context)


if __name__ == "__main__":
    asyncio.run(main())
