"""The service of a frozen model, for reference and teacher: starts the model's ranks, and ends when a rank ends."""

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path

from relaxd.board import roles_for
from relaxd.config import RunConfig
from relaxd.models.vocabulary import check_vocabularies
from relaxd.replica.gpus import gpu_environment
from relaxd.replica.replica_life import run_replica
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus, open_context
from relaxd.roles import ROLES
from relaxd.rpc.errors import FailedPrecondition
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import rank_pb2 as pb
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.weights import NCCL_ENVIRONMENT
from services.trainer.reference_models.followed_folder import await_run_folder
from services.trainer.service.rank_processes import Rank, RankPool, RankProcesses, rank_gauges

ANSWER_SECONDS = 10.0
"""Seconds after a drain's deadline in which rank 0 may still answer."""
DRAIN_MARGIN_SECONDS = 2.0
"""Seconds at the end of a drain in which rank 0 works no more but answers."""

logger = logging.getLogger(__name__)


class ModelService(ReplicaService):
    """Replica service that works on its role's stage with a model in rank processes. Idle in runs without the role.

    If a rank fails, the replica ends and its supervisor starts another. Other replicas get its groups at once, because
    the coordinator sees that the process is gone.
    """

    rank_module = "services.trainer.reference_models.frozen_rank"
    """Module that each rank process runs."""

    def __init__(self, context: ReplicaContext, role: str) -> None:
        self.role = role
        self._context = context
        self._settings = context.settings
        self._ranks: RankProcesses | None = None
        self._watching: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()
        self._detail = ""
        self._held = self._done = self._turns = 0
        self._done_before = 0

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        """Start the rank processes. Return once they have loaded the model."""
        if self.role not in roles_for(config):
            self._detail = f"this run needs no {self.role} service"
            return
        sizes = config.roles.sizes[self.role]
        folder = assignment.folder if self._follows(config) else ""
        await asyncio.to_thread(self._check, config, folder, assignment.begin_time.ToDatetime(UTC))
        gpus = await self._context.gpus.lease(sizes.ranks)
        self._detail = "starting the ranks"
        environment = gpu_environment(gpus) | NCCL_ENVIRONMENT
        gpu_lease = self._context.gpus.child_lease if gpus else None
        self._loaded.clear()
        self._ranks = ranks = RankProcesses(
            range(sizes.ranks),
            self._on_event,
            RankPool(environment, gpu_lease, self.rank_module),
            ports=config.weights.port_range,
        )
        await ranks.start()
        ranks.work(
            pb.WorkRequest(
                config_json=config.model_dump_json(),
                run_id=assignment.run_id,
                folder=folder,
                redis=self._settings.redis,
                replica_id=self._settings.replica_id,
                role=self.role,
                log_level=self._settings.log_level,
            )
        )
        failed, loaded = asyncio.create_task(ranks.failed()), asyncio.create_task(self._loaded.wait())
        try:
            await asyncio.wait({failed, loaded}, return_when=asyncio.FIRST_COMPLETED)
            if not loaded.done():
                raise await failed
        finally:
            failed.cancel()
            loaded.cancel()
        self._detail = ""
        self._watching = asyncio.create_task(self._give_up_with(ranks), name="watch the ranks")

    async def stop_run(self) -> None:
        ranks, watching = self._ranks, self._watching
        if self._loaded.is_set():
            await self.drain(0.0)
        self._ranks = self._watching = None
        if watching is not None:
            watching.cancel()
        if ranks is not None:
            await ranks.kill()
        self._detail = ""
        self._loaded.clear()
        self._done_before += self._done
        self._held = self._done = self._turns = 0

    async def pause_run(self) -> None:
        if self._ranks is not None and self._ranks.ranks:
            await self._ranks.rank0.set_paused(True)

    async def resume_run(self) -> None:
        if self._ranks is not None and self._ranks.ranks:
            await self._ranks.rank0.set_paused(False)

    async def drain(self, seconds: float) -> int:
        """Finish held groups, and hand back groups that aren't finished in time. Return the number still held."""
        if self._ranks is not None and self._ranks.ranks:
            soon = max(0.0, seconds - DRAIN_MARGIN_SECONDS)
            if await self._ranks.rank0.hand_back(soon, timeout=seconds + ANSWER_SECONDS):
                self._held = 0
        return self._held

    def status(self) -> ServiceStatus:
        return ServiceStatus(
            held_groups=self._held,
            done_groups=self._done_before + self._done,
            progress=self._turns,
            detail=self._detail,
            gauges=rank_gauges(self._ranks.ranks if self._ranks is not None else []),
        )

    def _follows(self, config: RunConfig) -> bool:
        """Return True if the ranks load new weights that the ledger names, and so need the run's folder."""
        return bool(config.roles.frozen[self.role].refresh_every)

    def _check(self, config: RunConfig, folder: str, begun: datetime) -> None:
        """Check that this replica can work on a run that began at `begun`, and sees its `folder`, if not "". Slow.

        Raises:
            DataError, RpcError: the replica can't work on the run.
        """
        if wrong := ROLES[self.role].wrong_module(ROLES[self.role].module, config):
            raise FailedPrecondition(wrong)
        if self.role in config.roles.frozen:
            check_vocabularies(config, self.role)
        if folder:
            await_run_folder(Path(folder), self.role, begun)

    async def _give_up_with(self, ranks: RankProcesses) -> None:
        self._context.give_up(str(await ranks.failed()))

    def _on_event(self, rank: Rank, event: pb.WorkResponse) -> None:
        if rank.number:
            return
        if event.HasField("loaded"):
            self._loaded.set()
        elif event.HasField("progress"):
            self._detail, self._held = event.progress.detail, event.progress.held_groups
            self._done, self._turns = event.progress.done_groups, event.progress.iterations


def main(role: str, service: type[ModelService] = ModelService) -> None:
    """Run the frozen model's service of a role until it is stopped."""
    asyncio.run(_run(role, service))


async def _run(role: str, service: type[ModelService]) -> None:
    async with open_context(parse_settings(role)) as context:
        await run_replica(service(context, role), context)
