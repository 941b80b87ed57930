"""Scale requests: accepted one at a time per role, executed replica by replica."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from relaxd.engines import ENGINES, list_engines
from relaxd.rpc.errors import AlreadyExists, FailedPrecondition, NotFound
from services.coordinator.fleet.registry import Registry, Replica
from services.coordinator.runs.run_manager import RunManager
from services.coordinator.scaling.launchers import EXTERNAL, NO_LAUNCHER, Launchers, sglang_launch_id
from services.coordinator.scaling.replica_drive import ReplicaDrive
from services.coordinator.scaling.scale_log import ScaleFilter, ScaleLog
from services.coordinator.state.records import Direction, ScaledReplica, ScaleRecord, ScaleSpec
from services.coordinator.state.retries import outlives_caller
from services.coordinator.state.store import AsyncStore

logger = logging.getLogger(__name__)


class Scaler:
    """Accepts and executes scale requests. Lives in the event loop."""

    def __init__(
        self,
        store: AsyncStore,
        registry: Registry,
        runs: RunManager,
        launchers: Launchers,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`on_error` receives errors that end the coordinator, such as Superseded."""
        self._registry = registry
        self._runs = runs
        self._launchers = launchers
        self._on_error = on_error
        self.log = ScaleLog(store, registry.changed)
        self._accepting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def resume(self) -> None:
        """Load the scale requests, and resume those that an earlier coordinator left in progress."""
        await self.log.load()
        for record in self.log.in_progress():
            logger.info("resuming scale request %s (%s)", record.request_id, record.state.lower())
            self._start(record.request_id)

    async def close(self) -> None:
        """Cancel the tasks that drive scale requests; the next coordinator resumes these requests."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @outlives_caller("a scale request")
    async def accept(self, request_id: str, spec: ScaleSpec, *, dry_run: bool = False) -> ScaleRecord:
        """Start a scale request, or return the existing one that this request repeats; with `dry_run`, start nothing.

        Raises AlreadyExists: the id belongs to a different request; FailedPrecondition: another request of the role is
        in progress, or this one is impossible; NotFound: no such replica.
        """
        async with self._accepting:
            current = next((record for record in self.log.in_progress() if record.spec.role == spec.role), None)
            known = self.log.find(request_id) if request_id else current
            if known is not None and known.spec == spec:
                return known
            if request_id and known is not None:
                raise AlreadyExists(f"scale request {request_id!r} asked for something else: choose another request_id")
            if current is not None:
                raise FailedPrecondition(
                    f"scale request {current.request_id!r} is in progress ({current.state.lower()}), and only one of "
                    f"role {spec.role} may be: wait for it, or cancel it",
                    reason="SCALE_REQUEST_IN_PROGRESS",
                    subject=current.request_id,
                )
            request_id = request_id or f"scale-{secrets.token_hex(3)}"
            scaled = (
                self._replicas_to_add(request_id, spec)
                if spec.direction == Direction.OUT
                else self._replicas_to_remove(spec)
            )
            deadline = datetime.now(UTC) + timedelta(seconds=spec.seconds)
            record = ScaleRecord(request_id=request_id, spec=spec, scaled=scaled, deadline=deadline)
            if not scaled:
                record = record.model_copy(update={"reason": "nothing to do"})
            if dry_run:
                return record
            await self.log.add(record)
            logger.info("scale request %s: %s %s", request_id, spec.direction.lower(), [r.launch_id for r in scaled])
            self._start(request_id)
            return record

    async def cancel_all(self, chosen: ScaleFilter, *, dry_run: bool) -> tuple[list[ScaleRecord], list[ScaleRecord]]:
        """Cancel the scale requests in progress that a filter selects, newest first.

        Returns the cancelled requests, and those with nothing left to roll back. With `dry_run` nothing changes.
        """
        cancelled, skipped = [], []
        for record in self.log.select(chosen):
            if record.state.ended:
                continue
            try:
                if dry_run:
                    self.log.check_cancellable(record)
                cancelled.append(record if dry_run else await self.log.cancel(record.request_id))
            except FailedPrecondition:
                skipped.append(record)
        return cancelled, skipped

    def live(self, role: str) -> list[Replica]:
        """Return the replicas of a role that are not draining, oldest first; of those with the same launch id only the
        newest."""
        replicas = [r for r in self._registry.of_role(role) if not r.draining]
        newest = {replica.launch_id or replica.replica_id: replica for replica in replicas}
        return sorted(newest.values(), key=lambda replica: replica.registered_at)

    def _replicas_to_add(self, request_id: str, spec: ScaleSpec) -> tuple[ScaledReplica, ...]:
        """Return the replicas that a request must create. Raises FailedPrecondition if they can't be created."""
        live = self.live(spec.role)
        if spec.addresses:
            there = {replica.registration.address for replica in live}
            return tuple(ScaledReplica(launch_id=EXTERNAL + one) for one in spec.addresses if one not in there)
        if spec.sglang_urls:
            self._check_engine()
            served = {replica.launch_id for replica in live}
            by_name = {sglang_launch_id(url): url for url in spec.sglang_urls}
            added = [ScaledReplica(launch_id=name, sglang_url=by_name[name]) for name in by_name if name not in served]
        else:
            missing = range(1, 1 + max(0, spec.replicas - len(live)))
            added = [ScaledReplica(launch_id=f"{spec.role}-{request_id}-{number}") for number in missing]
        if added and not self._launchers.address:
            raise FailedPrecondition(f"{NO_LAUNCHER}, or give the addresses of services that wait to join")
        share, rest = divmod(len(spec.gpu_uuids), max(1, len(added)))
        if rest:
            raise FailedPrecondition(
                f"gpu_uuids: {len(spec.gpu_uuids)} GPUs can't be divided evenly among {len(added)} new replicas"
            )
        return tuple(
            one.model_copy(update={"gpu_uuids": spec.gpu_uuids[index * share : (index + 1) * share]})
            for index, one in enumerate(added)
        )

    def _check_engine(self) -> None:
        """Raise FailedPrecondition if the active run's engine can't use an external server."""
        active = self._runs.active
        if active is not None and not ENGINES[active.config.rollout.engine].takes_url:
            able = list_engines("rollout", lambda engine: engine.takes_url)
            raise FailedPrecondition(
                f"sglang_urls: run {active.record.run_id!r} has rollout.engine {active.config.rollout.engine!r}; "
                f"only runs with {able} use servers that run already"
            )

    def _replicas_to_remove(self, spec: ScaleSpec) -> tuple[ScaledReplica, ...]:
        """Return the replicas that a request must remove. Raises NotFound, FailedPrecondition."""
        live = self.live(spec.role)
        if spec.replica_ids:
            named = (self._removable(replica_id, spec.role) for replica_id in spec.replica_ids)
            removed = list({replica.launch_id: replica for replica in named}.values())
        else:
            surplus = len(live) - spec.replicas
            scaled_out = [replica for replica in reversed(live) if replica.launch_id]
            if surplus > len(scaled_out):
                stay = len(live) - len(scaled_out)
                raise FailedPrecondition(
                    f"replicas: {stay} of the {len(live)} {spec.role} replicas were not scaled out and "
                    f"can't be removed: there can't be only {spec.replicas}"
                )
            removed = scaled_out[: max(0, surplus)]
        return tuple(
            ScaledReplica(launch_id=v.launch_id, replica_id=v.replica_id, address=v.registration.address)
            for v in removed
        )

    def _removable(self, replica_id: str, role: str) -> Replica:
        replica = self._registry.get(replica_id)
        if replica is None or replica.registration.role != role:
            raise NotFound(f"no {role} replica {replica_id!r} is registered")
        if not replica.launch_id:
            raise FailedPrecondition(f"{replica_id} was not scaled out: stop it where it was started")
        return replica

    def _start(self, request_id: str) -> None:
        task = asyncio.create_task(self._carry_out(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def _carry_out(self, request_id: str) -> None:
        while not self.log.get(request_id).state.ended:  # a rollback begins when some have ended already
            drives = [
                ReplicaDrive(
                    replica.launch_id,
                    request_id,
                    self.log,
                    registry=self._registry,
                    runs=self._runs,
                    launchers=self._launchers,
                )
                for replica in self.log.get(request_id).scaled
                if not replica.state.ended
            ]
            tasks = [asyncio.create_task(drive.run()) for drive in drives]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        logger.info("scale request %s is %s", request_id, self.log.get(request_id).state.lower())
