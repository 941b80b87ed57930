"""The processes that become ranks on this machine, some of them started in advance."""

import asyncio
import logging
from collections.abc import Mapping

from relaxd.process.child import Child, ChildError
from relaxd.process.gpu_lease import GpuLease

RANK = "services.trainer.loop.training_rank"
"""The program of the trainer's ranks."""

logger = logging.getLogger(__name__)


class RankPool:
    """Starts the processes of ranks of one run, and keeps spare ones for a run whose ranks end together.

    Loading torch and Megatron takes a core 3 s. A spare process has loaded them, and uses no device before it works.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        gpu_lease: GpuLease | None,
        module: str = RANK,
        *,
        spares: int = 0,
    ) -> None:
        """`spares`: number of spare processes, once `prepare` is called."""
        self._environment = environment
        self._gpu_lease = gpu_lease
        self._module = module
        self._count = spares
        self._spares: list[Child] = []
        self._preparing: asyncio.Task[None] | None = None

    async def take(self, name: str, place: Mapping[str, str]) -> Child:
        """Return a process that becomes a rank: a spare one, or a new one. Raises ChildError.

        `place` are environment variables for a new one; a spare one gets them with its work.
        """
        while self._spares:
            child = self._spares.pop(0)
            if child.alive:
                child.rename(name)
                return child
        return await self._start(name, place)

    def prepare(self) -> None:
        """Start the missing spare processes in the background."""
        if self._count and (self._preparing is None or self._preparing.done()):
            self._preparing = asyncio.create_task(self._prepare(), name="spare ranks")

    async def close(self) -> None:
        """Kill the spare processes, and wait until they have exited."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait({self._preparing})
        for child in self._spares:
            child.kill()
        for child in self._spares:
            await asyncio.shield(child.exited)
        self._spares = []

    async def _prepare(self) -> None:
        self._spares = [child for child in self._spares if child.alive]
        try:
            while len(self._spares) < self._count:
                self._spares.append(await self._start("spare rank", {}))
        except ChildError as error:  # the next start does without
            logger.warning("%s", error)

    async def _start(self, name: str, place: Mapping[str, str]) -> Child:
        return await Child.start(self._module, env={**self._environment, **place}, name=name, gpu_lease=self._gpu_lease)
